"""`flashspec bench bandit`: does choosing the drafter pay? Every policy against every fixed arm, by workload and on all of them mixed.

Two measurements. *Replay*: each prompt is answered once, and the exact law of acceptance on that text prices every arm and plays every
policy with the machine's own cost table, many times, without noise between contestants. *Live*: the default policy, the best fixed arms
and the hand rule really decode all prompts mixed, alternating prompt by prompt, by the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from typing import Any

import numpy as np

from flashspec import bandits
from flashspec.bandits import CostTable, Fixed, Policy
from flashspec.bandits.baselines import hand_rule
from flashspec.bandits.simulators import TraceReplay
from flashspec.calibration import measure_costs
from flashspec.engine import Request, SpeculativeDecoder
from flashspec.machine import describe
from flashspec.models.catalog import Family
from flashspec.records import Arm, Round, Trace, totals
from flashspec.replay import NOTHING_TO_LEARN, REGIME, play_text, regret, world
from flashspec.sampling import SamplingParams

RUNS = 32  # games of each policy in replay
MIXED = "mixed"
Write = Callable[[str], None]


@dataclass(frozen=True)
class Text:
    """One answered prompt as a world to play in."""

    workload: str
    prompt: list[int]
    world: TraceReplay


@dataclass(frozen=True)
class Line:
    """One contestant on one workload. rate: tokens per second; lost: seconds more than the best fixed arm of that workload."""

    workload: str
    contestant: str
    rate: float
    of_best: float
    lost: float
    choices: str = ""


def run(
    family: Family,
    prompts: dict[str, list[str]],
    *,
    temperature: float = 0.7,
    rule: str = "block",
    tokens: int = 128,
    policies: Sequence[str] = bandits.POLICIES,
    live: int = 1,
    source: str = "ours",
    write: Write = print,
) -> dict[str, Any]:
    """Measure and print; returns the result as plain data.

    live: passes over all prompts with the clock, 0 for replay alone. source: where the prompts are from, for the record.
    """
    request = Request(tokens, SamplingParams(temperature=temperature), rule, candidates=0)
    arms, decoder = family.arms(), family.decoder()
    costs = measure_costs(decoder, arms, request)
    machine = describe(family.target, family.layout)
    write(
        f"{family.name}, T = {temperature:g}, {rule} rule, {tokens} tokens; {machine['device']}, {machine['dtype']}\n"
    )
    _print_costs(costs, write)
    texts = [
        _answer(decoder, family.encode(prompt), kind, request, arms, costs, seed)
        for kind, some in prompts.items()
        for seed, prompt in enumerate(some)
    ]
    lines: list[Line] = []
    heads: dict[str, float] = {}
    for kind in [*prompts, MIXED]:
        chosen = _shuffled(texts) if kind == MIXED else [text for text in texts if text.workload == kind]
        found, heads[kind] = _replayed(kind, chosen, arms, costs, policies)
        lines += found
        _print_lines(kind, found, heads[kind], write)
    result: dict[str, Any] = {
        "family": family.name, "prompts": source, "machine": machine, "date": date.today().isoformat(), "temperature": temperature,
        "rule": rule, "tokens": tokens, "headroom": heads, "replay": [asdict(line) for line in lines], "live": [],
    }  # fmt: skip
    if live:
        found = _live(decoder, texts, _worth_running(lines, arms), costs, request, live)
        _print_lines("mixed, by the clock", found, None, write)
        result["live"] = [asdict(line) for line in found]
    return result


def _worth_running(lines: Sequence[Line], arms: Sequence[Arm]) -> list[Arm]:
    """Plain decoding and the fixed arms that are best somewhere."""
    best = {line.contestant for line in lines if line.of_best == 1.0}
    return [arm for arm in arms if str(arm) in best or arm.gamma == 0]


def _answer(
    decoder: SpeculativeDecoder, prompt: list[int], kind: str, request: Request, arms: Sequence[Arm], costs: CostTable, seed: int
) -> Text:  # fmt: skip
    request = replace(request, seed=seed)
    rounds = tuple(decoder.rounds(prompt, request, Fixed(arms[0])))
    trace = Trace("", "", len(prompt), asdict(request), {}, rounds)
    return Text(kind, prompt, world(trace, decoder, arms, costs, prompt))


def _shuffled(texts: Sequence[Text]) -> list[Text]:
    order = np.random.default_rng(0).permutation(len(texts))
    return [texts[i] for i in order]


def _replayed(
    kind: str, texts: Sequence[Text], arms: Sequence[Arm], costs: CostTable, policies: Sequence[str]
) -> tuple[list[Line], float]:
    """Every fixed arm and every policy on the texts in their order, a policy learning from one to the next; and the headroom."""
    tokens = sum(text.world.length for text in texts)
    analyses = [regret(text.world) for text in texts]
    fixed = np.sum([analysis.fixed[:, -1] for analysis in analyses], 0)
    best = float(fixed.min())

    def line(name: str, seconds: float, choices: str = "") -> Line:
        return Line(kind, name, tokens / seconds, best / seconds, seconds - best, choices)

    lines = [line(str(arm), float(seconds)) for arm, seconds in zip(arms, fixed, strict=True)]
    for name in policies:
        policy = bandits.policy(name, arms, costs, runs=RUNS)
        worlds = [text.world.only(policy.arms) for text in texts]
        seconds, pulls = play_text(policy, worlds)
        lines.append(line(name, float(seconds.mean()), _shares(policy.arms, pulls.sum(0))))
    lines.append(line("oracle (knows the text)", float(sum(analysis.oracle[-1] for analysis in analyses))))
    return lines, best / sum(analysis.regimes for analysis in analyses) - 1


def _live(
    decoder: SpeculativeDecoder, texts: Sequence[Text], fixed: Sequence[Arm], costs: CostTable, request: Request, passes: int
) -> list[Line]:  # fmt: skip
    """Decode all prompts by the clock: all contestants answer a prompt before the next one comes, in an order that turns."""
    chosen = _shuffled(texts)
    contestants: dict[str, Policy] = {str(arm): Fixed(arm) for arm in fixed}
    contestants["rule"] = hand_rule(costs.arms)
    contestants[bandits.DEFAULT] = bandits.policy(bandits.DEFAULT, costs.arms, costs)
    rounds: dict[str, list[Round]] = {name: [] for name in contestants}
    for number, text in enumerate([*chosen] * passes):
        names = list(contestants)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            rounds[name] += decoder.rounds(text.prompt, replace(request, seed=number), contestants[name])
    sums = {name: totals(some) for name, some in rounds.items()}
    rates = {name: total.rate or 0.0 for name, total in sums.items()}
    best = max(rates[str(arm)] for arm in fixed)
    return [
        Line(MIXED, name, rates[name], rates[name] / best, sums[name].seconds - sums[name].tokens / best,
             _shares(policy.arms, policy.pulls[0]))
        for name, policy in contestants.items()
    ]  # fmt: skip


def _shares(arms: Sequence[Arm], pulls: Any) -> str:
    """“lookup γ=8 61 %, plain 20 %”: the arms chosen in more than one round of twenty."""
    if len(arms) == 1:
        return ""
    share = pulls / max(pulls.sum(), 1)
    return ", ".join(f"{arms[k]} {share[k]:.0%}" for k in np.argsort(-share) if share[k] > 0.05)


def _print_costs(costs: CostTable, write: Write) -> None:
    write("milliseconds a round, by tokens drafted (measured at start-up)")
    write(f"{'':24}" + "".join(f"{g:>7}" for g in range(costs.seconds.shape[1])))
    for name, row in zip(costs.names, costs.seconds, strict=True):
        write(f"{name:24}" + "".join(f"{1000 * value:7.1f}" for value in row))
    write("")


def _print_lines(kind: str, lines: Sequence[Line], headroom: float | None, write: Write) -> None:
    write(f"{kind}")
    if headroom is not None:
        best = max((line for line in lines if line.of_best == 1.0), key=lambda line: line.rate)
        verdict = "nothing to learn here" if headroom < NOTHING_TO_LEARN else "worth switching"
        write(f"headroom of switching every {REGIME} tokens: {headroom:.1%} over always {best.contestant}: {verdict}")
    write(f"{'':26}{'tok/s':>7}{'of best fixed':>15}{'s lost':>8}  choices")
    for line in lines:
        write(f"{line.contestant:26}{line.rate:7.1f}{line.of_best:15.3f}{line.lost:8.2f}  {line.choices}")
    write("")
