"""What a policy is told to maximise. Tokens per second is the goal; three popular proxies are here to show where they lead.

A reward declares its range before the game, and a value outside raises. Scaling by the largest value seen so far, or not scaling
at all, silences the exploration bonus of every UCB rule or drowns the rewards in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from flashspec.bandits.base import Outcome
from flashspec.bandits.costs import CostTable
from flashspec.records import Arm

Array = Any


class Reward(Protocol):
    """`range` is declared; the call gives one value a run within it."""

    range: tuple[float, float]

    def __call__(self, chosen: Array, outcome: Outcome) -> Array:
        """chosen [runs], outcome [runs] -> [runs]."""


class TokensPerSecond:
    """Y / c with the *tabled* cost of the arm: its mean is the arm's rate, because c does not depend on the round.

    The table is copied, so that the declared range holds for the whole game.
    """

    def __init__(self, costs: CostTable) -> None:
        self._seconds = costs.usual.copy()
        self.range = (0.0, float(max((arm.gamma + 1) / s for arm, s in zip(costs.arms, self._seconds, strict=True))))

    def __call__(self, chosen: Array, outcome: Outcome) -> Array:
        return outcome.tokens / self._seconds[chosen]


class AcceptedTokens:
    """Tokens per round: blind to cost, so it chooses the longest blocks."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        self.range = (0.0, float(max(arm.gamma for arm in arms) + 1))

    def __call__(self, chosen: Array, outcome: Outcome) -> Array:
        return outcome.tokens


class AcceptanceRate:
    """Accepted share of what was drafted: chooses short blocks of the best drafter, whatever it costs."""

    range = (0.0, 1.0)

    def __call__(self, chosen: Array, outcome: Outcome) -> Array:
        return outcome.accepted / np.maximum(outcome.drafted, 1)


class MeanRate:
    """Y / C of the round itself, whose mean is not the rate: E[Y/C] = E[Y]/E[C] − Cov(Y/C, C)/E[C].

    Measured seconds have no lower bound, so the declared range is four times the table's and values beyond it are cut.
    """

    def __init__(self, costs: CostTable) -> None:
        fastest = (costs.gammas.max() + 1) / costs.seconds.min()
        self.range = (0.0, 4 * float(fastest))

    def __call__(self, chosen: Array, outcome: Outcome) -> Array:
        return np.minimum(outcome.tokens / (outcome.seconds + outcome.catch_up), self.range[1])


def scaled(reward: Reward, chosen: Array, outcome: Outcome) -> Array:
    """The reward as a number in [0, 1]. Raises ValueError where it leaves its declared range."""
    low, high = reward.range
    value = (reward(chosen, outcome) - low) / (high - low)
    if ((value < -1e-9) | (value > 1 + 1e-9)).any():
        raise ValueError(f"A reward left its declared range {low:g} to {high:g}.")
    return value.clip(0, 1)
