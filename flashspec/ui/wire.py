"""Rounds as the browser gets them: short keys, numbers with few digits. `assets/page/run.js` reads this form and turns it back into a Trace.

A round: {"i", "at", "arm": [drafter, γ], "gamma", "rule", "backend", "stop", "tau", "late", "s": seconds of draft, target, verify, catch-up,
other, policy, "e": [[index, mean, width] of every arm] | null,
"drafted": [[text, piece, verdict, id, p, q, threshold, uniform, candidates], …], "next": [text, piece, kind, id, p, candidates] | null};
a candidate: [id, text, p, q, residual].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from flashspec.records import Arm, Candidate, Round, Totals, Trace


def head(trace: Trace, arms: Sequence[Arm]) -> dict[str, Any]:
    """What is known before the first round, with all arms that there are to choose among."""
    return {
        "family": trace.family, "prompt": trace.prompt, "prompt_tokens": trace.prompt_tokens, "settings": trace.settings,
        "machine": trace.machine, "arms": [str(arm) for arm in arms],
    }  # fmt: skip


def pack(round: Round) -> dict[str, Any]:
    """A Round in the short form."""
    estimates = round.estimates
    return {
        "i": round.index, "at": round.position, "arm": list(round.arm), "gamma": round.gamma, "rule": round.rule,
        "backend": round.backend, "stop": round.stop, "tau": round.tau, "late": round.caught_up,
        "s": [_short(value) for value in astuple(round.seconds)],
        "e": estimates and [[_short(value, 2) for value in astuple(e)] for e in estimates.values()],
        "drafted": [
            [d.text, d.piece, d.verdict, d.id, _share(d.p), _share(d.q), _share(d.threshold), _share(d.uniform), _top(d.candidates)]
            for d in round.drafted
        ],
        "next": round.next
        and [round.next.text, round.next.piece, round.next.kind, round.next.id, _share(round.next.p), _top(round.next.candidates)],
    }  # fmt: skip


def figures(total: Totals) -> dict[str, Any]:
    """The counts behind the figures at the top of the page."""
    return {
        "tokens": total.tokens, "rounds": total.rounds, "drafted": total.drafted, "accepted": total.accepted,
        "seconds": round(total.seconds, 4),
    }  # fmt: skip


def _top(candidates: Sequence[Candidate]) -> list[list[Any]]:
    return [[c.id, c.text, _share(c.p), _share(c.q), _share(c.residual)] for c in candidates]


def _short(value: float | None, digits: int = 6) -> float | None:
    return None if value is None else round(value, digits)


def _share(value: float | None) -> float | None:
    """Four significant digits: ratios of small probabilities must still be right."""
    return None if value is None else float(f"{value:.4g}")
