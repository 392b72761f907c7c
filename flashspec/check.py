"""`flashspec check`: is this family, as it runs here, exact? Enumeration, identities, the statistical gate and its power."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from flashspec.bandits import Fixed
from flashspec.engine import Request
from flashspec.exactness import (
    FAULTS,
    Bench,
    RestrictedModel,
    Scheme,
    emitted_law,
    gate,
    impossible,
    random_case,
    target_law,
)
from flashspec.models.catalog import Family, drafters
from flashspec.records import Arm
from flashspec.sampling import SamplingParams
from flashspec.verifiers.rules import BLOCK, RULES, TOKEN

ALPHA = 0.001  # family-wise, over all tests of one command
TESTS_A_GATE = 5  # KS joint, KS of three tokens, chi-square
TOKENS = 3
GAMMA = 2
VOCABULARY = 64
PROMPT = "One day a man and a dog went to the park. One day a"  # repeats for the lookup, and is open
# Planted in the running engine to show that the gate can fail, whatever the family. Faults of the block rule alone change the law of real
# models by less than ten thousand samples show: enumeration finds them.
SAMPLED_FAULTS = ("replacement from p, not the residual", "last accepted token overwritten, no bonus")


@dataclass(frozen=True)
class Verdict:
    """One line of the report."""

    name: str
    passed: bool
    detail: str


def check(
    family: Family,
    temperatures: Sequence[float] = (0.0, 0.7, 1.0, 1.3),
    top_p: float = 0.9,
    samples: int = 10_000,
    only: Sequence[str] | None = None,
    chosen_rules: Sequence[str] = tuple(RULES),
) -> Iterator[Verdict]:
    """Yield one Verdict after another; all must pass."""
    yield from enumeration()
    names = list(only or family.drafters)
    for name in names:
        family.arm(name, GAMMA)  # an unknown one is told before anything is drawn
    yield from identities(family, names, chosen_rules, 0.0 in temperatures)
    bench = restricted(family)
    warm = [t for t in temperatures if t > 0]
    tests = TESTS_A_GATE * (len(warm) * len(names) * len(chosen_rules) + len(SAMPLED_FAULTS))
    for temperature in warm:
        params = SamplingParams(temperature=temperature, top_p=top_p)
        for rule in chosen_rules:
            for name in names:
                yield run_gate(bench, name, rule, params, samples, ALPHA / tests)
    if warm:
        yield from power(bench, SamplingParams(temperature=warm[-1], top_p=top_p), samples, ALPHA / tests)


def enumeration() -> Iterator[Verdict]:
    """The law as rational numbers, and every planted fault."""
    cases = [random_case(seed, vocabulary=3, gamma=gamma) for gamma in (1, 2) for seed in range(10)]
    for name, rule in (("token", TOKEN), ("block", BLOCK)):
        stops = (Fraction(0), Fraction(1, 2))
        exact = all(
            emitted_law(case, Scheme(rule, stop_below=stop)) == target_law(case) for case in cases for stop in stops
        )
        yield Verdict(
            f"enumeration, {name} rule",
            exact,
            f"{len(cases)} random worlds, laws equal as rationals, early stop included",
        )
    caught = [
        name for name, fault in FAULTS.items() if any(emitted_law(case, fault) != target_law(case) for case in cases)
    ]
    missed = ", ".join(FAULTS.keys() - caught)
    yield Verdict(
        "planted faults, enumeration",
        not missed,
        f"{len(caught)} of {len(FAULTS)} rejected" + (f"; missed: {missed}" if missed else ""),
    )


def identities(family: Family, names: Sequence[str], chosen_rules: Sequence[str], greedy: bool) -> Iterator[Verdict]:
    """Greedy ids equal plain decoding; coupled ids depend on the seed alone. Where the block a token is read in does not change its logits."""
    if not family.blockwise_equal:
        yield Verdict(
            "identities", True, f"skipped: {family.target.dtype} rounds differently in blocks of different length"
        )
        return
    prompts = [family.encode("Write three short sentences about the sea."), family.encode(PROMPT, chat=False)]
    wanted = [("greedy", rule, SamplingParams(temperature=0)) for rule in chosen_rules if greedy]
    if "coupled" in chosen_rules:
        wanted.append(("seeded", "coupled", SamplingParams(temperature=0.8, top_p=0.95)))
    for what, rule, params in wanted:
        request = Request(max_new_tokens=32, sampling=params, rule=rule, seed=11, candidates=0)
        plain = [_ids(family, prompt, Arm("plain", 0), request) for prompt in prompts]
        for name in names:
            equal = [_ids(family, prompt, Arm(name, 4), request) for prompt in prompts] == plain
            yield Verdict(
                f"{what} identity, {rule} rule, {name}",
                equal,
                f"{len(prompts)} prompts, 32 ids, γ = 4, against plain decoding",
            )


def restricted(family: Family) -> Bench:
    """The family over the tokens that matter behind PROMPT, so that ten thousand runs of the engine take seconds."""
    prompt = family.encode(PROMPT, chat=False)
    target, *models = family.cached()
    longer, likely = list(prompt), target.read(prompt)[0, -1].float()
    for _ in range(2):  # also what is likely one and two tokens later
        longer = [*longer, int(likely.argmax())]
        likely = torch.maximum(likely, target.read(longer)[0, -1].float())
    ids = list(dict.fromkeys([*prompt, *likely.topk(VOCABULARY).indices.tolist()]))
    small, *small_models = (RestrictedModel(model, ids) for model in (target, *models))
    return Bench(small, drafters(small_models, len(ids)), tuple(ids.index(t) for t in prompt))


def run_gate(bench: Bench, drafter: str, rule: str, params: SamplingParams, samples: int, alpha: float) -> Verdict:
    """Ten thousand texts of three tokens against the target's joint law."""
    request = Request(max_new_tokens=TOKENS, sampling=params, rule=rule, seed=1)
    texts = bench.sample(Arm(drafter, 0 if drafter == "plain" else GAMMA), request, samples)
    worst = min(gate(bench, texts, params), key=lambda result: result.p_value)
    outside = impossible(bench, texts, params)
    return Verdict(
        f"gate, T = {params.temperature}, {rule} rule, {drafter}",
        worst.p_value >= alpha and outside == 0,
        f"{samples} samples, smallest p = {worst.p_value:.3g} ({worst.name}), α = {alpha:.2g}, {outside} impossible texts",
    )


def power(bench: Bench, params: SamplingParams, samples: int, alpha: float) -> Iterator[Verdict]:
    """The same gate on an engine with a planted fault: it must fail."""
    drafter = next(name for name in bench.drafters if name not in ("plain", "lookup"))
    for name in SAMPLED_FAULTS:
        with planted(name) as rule:
            failed = not run_gate(bench, drafter, rule, params, samples, alpha).passed
        yield Verdict(f"gate rejects: {name}", failed, f"{samples} samples, {drafter}, T = {params.temperature}")


class planted:
    """Within the block the engine knows a rule with fault `name`, under the name that entering returns."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> str:
        RULES[self._name] = FAULTS[self._name].rule
        return self._name

    def __exit__(self, *error: object) -> None:
        del RULES[self._name]


def report(verdicts: Iterator[Verdict], write: Callable[[str], None] = print) -> bool:
    """Print each verdict as it comes and a sentence at the end; returns whether all passed."""
    failed: list[Verdict] = []
    count = 0
    for count, verdict in enumerate(verdicts, 1):  # noqa: B007
        write(f"{'pass' if verdict.passed else 'FAIL'}  {verdict.name}: {verdict.detail}")
        if not verdict.passed:
            failed.append(verdict)
    write("")
    if failed:
        write(f"NOT EXACT: {len(failed)} of {count} checks failed: " + "; ".join(v.name for v in failed) + ".")
    else:
        write(f"EXACT: all {count} checks passed (family-wise α = {ALPHA}).")
    return not failed


def _ids(family: Family, prompt: list[int], arm: Arm, request: Request) -> list[int]:
    rounds = family.decoder().rounds(prompt, request, Fixed(arm))
    return [token for round in rounds for token in round.emitted]
