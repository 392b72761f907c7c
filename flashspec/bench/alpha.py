"""`flashspec bench alpha`: how often every drafter is right, by kind of work, and how much the target repeats itself.

The target answers each prompt alone; then every drafter is compared with it at every position of that text (`evidence`), so that
nothing but the text is sampled and all drafters are judged on the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from typing import Any

import numpy as np

from flashspec.bandits import Evidence, Fixed
from flashspec.engine import Request, SpeculativeDecoder
from flashspec.evidence import evidence
from flashspec.machine import describe
from flashspec.models.catalog import Family
from flashspec.records import Arm
from flashspec.sampling import SamplingParams

GAMMA = 4  # drafted tokens of the rounds that are priced
NGRAM = 4


@dataclass(frozen=True)
class Line:
    """One drafter on one kind of work. alpha: chance that its first drafted token is accepted, where it drafts; drafts: share of
    positions where it does; per_pass: expected tokens of a round with GAMMA drafted tokens, token rule."""

    workload: str
    drafter: str
    alpha: float
    drafts: float
    per_pass: float


def run(
    family: Family,
    prompts: Mapping[str, Sequence[str]],
    *,
    temperature: float = 0.7,
    tokens: int = 128,
    source: str = "ours",
    write: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure and print; returns the result as plain data. source: where the prompts are from, for the record."""
    request = Request(tokens, SamplingParams(temperature=temperature), "token", candidates=0)
    decoder = family.decoder()
    arms = [Arm(name, GAMMA) for name in family.drafters if name != "plain"]
    machine = describe(family.target, family.layout)
    write(f"{family.name}, T = {temperature:g}, {tokens} tokens, γ = {GAMMA}, token rule; {machine['dtype']}\n")
    write(f"{'':18}{'drafter':22}{'acceptance':>11}{'drafts':>8}{'tokens a pass':>15}")
    lines: list[Line] = []
    repeated: dict[str, float] = {}
    for kind, some in prompts.items():
        judged: dict[str, list[Evidence]] = {arm.drafter: [] for arm in arms}
        echoes = []
        for seed, prompt in enumerate(some):
            found, text = _judge(decoder, family.encode(prompt), replace(request, seed=seed), arms)
            echoes.append(repetition(text))
            for name, seen in found.items():
                judged[name].append(seen)
        repeated[kind] = float(np.mean(echoes))
        for name, every in judged.items():
            lines.append(_line(kind, name, every))
            shown = lines[-1]
            write(f"{kind:18}{name:22}{shown.alpha:11.3f}{shown.drafts:8.0%}{shown.per_pass:15.2f}")
        write(f"{kind:18}{'repeated 4-grams':22}{repeated[kind]:11.1%}\n")
    write(f"repeated 4-grams of {family.target_name} on all texts: {np.mean(list(repeated.values())):.1%}")
    return {
        "family": family.name, "prompts": source, "per_workload": max(map(len, prompts.values())), "machine": machine,
        "date": date.today().isoformat(), "temperature": temperature, "tokens": tokens, "gamma": GAMMA,
        "lines": [asdict(line) for line in lines], "repeated": repeated,
    }  # fmt: skip


def repetition(text: Sequence[int], n: int = NGRAM) -> float:
    """Share of the n-grams of a text that stood in it before; 0 where it has none."""
    grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _judge(
    decoder: SpeculativeDecoder, prompt: list[int], request: Request, arms: Sequence[Arm]
) -> tuple[dict[str, Evidence], list[int]]:
    """The target's answer to `prompt`, and what every drafter would have done on it."""
    rounds = list(decoder.rounds(prompt, request, Fixed(Arm("plain", 0))))
    answer = [token for round in rounds for token in round.emitted]
    text = [*prompt, *answer]
    positions = range(len(prompt), len(text))
    logits = decoder.target.read(text[:-1], keep=len(answer))[0]
    found, _ = evidence(decoder.drafters, arms, logits, text, len(prompt), request, positions, average=True)
    return found, answer


def _line(kind: str, name: str, every: Sequence[Evidence]) -> Line:
    survival = np.concatenate([seen.survival for seen in every])
    drafts = np.concatenate([seen.drafted for seen in every]) > 0
    alpha = float(survival[drafts, 0].mean()) if drafts.any() else 0.0
    return Line(kind, name, alpha, float(drafts.mean()), float(1 + survival.sum(1).mean()))
