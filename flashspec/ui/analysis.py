"""Regret of a finished run by exact replay, as curves for the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flashspec.bandits import CostTable
from flashspec.engine import SpeculativeDecoder
from flashspec.records import Arm, Trace
from flashspec.replay import covering, hand_rule_at, regret, world

POINTS = 60  # of a curve


def regret_of(
    trace: Trace, decoder: SpeculativeDecoder, arms: Sequence[Arm], costs: CostTable, prompt: Sequence[int]
) -> dict[str, Any] | None:
    """Seconds lost against the best fixed arm at positions of the text, by the run, the hand rule and the oracle; None for an empty text.

    All is priced by one cost table, which knows `arms` and those of the trace: what the clock says besides is not regret.
    {"tokens": [n], "run", "rule", "oracle": curves, "best": arm, "fixed": {arm: seconds for the whole text}, "headroom",
    "clairvoyant", "verdict"}.
    """
    if not any(round.emitted for round in trace.rounds):
        return None
    played = list(dict.fromkeys([*arms, *(round.arm for round in trace.rounds)]))
    text = world(trace, decoder, played, costs, prompt)
    # The comparison is among the arms on offer; an arm that only this run used is no comparator.
    found = regret(text.only(tuple(arms)))
    paid = np.zeros(text.length)
    at = 0
    for done in trace.rounds:
        paid[at] = text.seconds[played.index(done.arm), at]
        at += len(done.emitted)
    best = found.fixed[found.arms.index(found.best)]
    rule = covering(text, hand_rule_at(text, tuple(arms)))
    # A round pays when it begins; the token that it ends with is the first that stands for certain.
    shown = np.unique(np.linspace(0, text.length - 1, min(POINTS, text.length)).round().astype(int))
    curves = {"run": np.cumsum(paid) - best, "rule": rule - best, "oracle": found.oracle - best}
    return {
        "tokens": (shown + 1).tolist(),
        **{name: np.round(curve[shown], 4).tolist() for name, curve in curves.items()},
        "best": str(found.best),
        "best_seconds": round(found.best_seconds, 4),
        "fixed": {str(arm): float(np.round(line[-1], 4)) for arm, line in zip(found.arms, found.fixed, strict=True)},
        "headroom": round(found.headroom, 4),
        "clairvoyant": round(found.clairvoyant_headroom, 4),
        "verdict": found.verdict,
    }
