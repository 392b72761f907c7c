"""What theory guarantees about regret: lines for the charts and bars for the tests. Rewards in [0, 1] unless stated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flashspec.bandits.stochastic import kl

Array = Any


def auer(means: Sequence[float], rounds: int) -> float:
    """UCB1: expected regret ≤ Σ 8 ln n/Δ + (1 + π²/3) Σ Δ (Auer et al. 2002, Theorem 1). A guarantee, and a loose one."""
    gaps = [max(means) - mean for mean in means]
    return sum(8 * np.log(rounds) / gap + (1 + np.pi**2 / 3) * gap for gap in gaps if gap > 0)


def auer_pulls(gap: float, rounds: int) -> float:
    """UCB1: expected pulls of an arm `gap` below the best ≤ 8 ln n/Δ² + 1 + π²/3."""
    return float(8 * np.log(rounds) / gap**2 + 1 + np.pi**2 / 3)


def lai_robbins(means: Sequence[float], rounds: int) -> float:
    """ln n·Σ Δ/kl(μ, μ*): the slope that no consistent policy beats for long. Asymptotic, so a curve may lie below it for a while."""
    best = max(means)
    return float(np.log(rounds) * sum((best - mean) / kl(mean, best) for mean in means if mean < best))


def exp3(arms: int, rounds: int) -> float:
    """2√(n K ln K), against any sequence of rewards (Lattimore & Szepesvári 2020, Theorem 11.1 with the anytime rate)."""
    return float(2 * np.sqrt(rounds * arms * np.log(arms)))


def hedge(arms: int, rounds: int) -> float:
    """√(n ln K / 2), on every single sequence of losses (Cesa-Bianchi & Lugosi 2006, Theorem 2.2)."""
    return float(np.sqrt(rounds * np.log(arms) / 2))


def seconds_lost(rates: Sequence[float], costs: Sequence[float], largest: float, rounds: int) -> float:
    """UCB1 on Y/c with known costs: Σ (c/ρ*)·[8 X² ln n/(ρ* − ρ) + (1 + π²/3)(ρ* − ρ)], rewards within [0, X = `largest`].

    Auer's bound in seconds: pulling an arm costs c(ρ* − ρ)/ρ*. Proof in one line: N ≤ 8 X² ln n/(ρ* − ρ)² + 1 + π²/3.
    """
    best = max(rates)
    pairs = [(best - rate, cost) for rate, cost in zip(rates, costs, strict=True) if rate < best]
    return sum(cost / best * (8 * largest**2 * np.log(rounds) / gap + (1 + np.pi**2 / 3) * gap) for gap, cost in pairs)
