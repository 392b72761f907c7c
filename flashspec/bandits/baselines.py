"""Policies that learn nothing, the hand rule among them: the lines that every bandit has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flashspec.bandits.base import Context, Outcome, Policy
from flashspec.records import Arm

Array = Any


class _Unlearning(Policy):
    def learn(self, chosen: Array, outcome: Outcome) -> None:
        return None


class Fixed(_Unlearning):
    """Always the same arm."""

    waits = False

    def __init__(self, arm: Arm, *, runs: int = 1) -> None:
        super().__init__([arm], runs=runs)

    def score(self, context: Context) -> Array:
        return np.zeros((self.runs, 1))


class UniformRandom(_Unlearning):
    """Any arm with equal chance."""

    def score(self, context: Context) -> Array:
        return self.rng.random((self.runs, len(self.arms)))


class RoundRobin(_Unlearning):
    """One arm after another."""

    def score(self, context: Context) -> Array:
        return -self.pulls


class LookupElseDraft(_Unlearning):
    """The hand rule: `lookup` if the text offers a match, else `otherwise`. Two lines that are hard to beat."""

    def __init__(self, lookup: Arm, otherwise: Arm, *, runs: int = 1) -> None:
        super().__init__([lookup, otherwise], runs=runs)

    def score(self, context: Context) -> Array:
        match = np.broadcast_to(context.match_length > 0, self.runs)
        return np.stack([match, ~match], 1).astype(float)


def hand_rule(arms: Sequence[Arm], runs: int = 1) -> LookupElseDraft:
    """The rule made of the given arms: their longest lookup, else the cheapest model, named last, with its shortest block of two or more.

    Raises ValueError where there is no such pair.
    """
    lookups = [arm for arm in arms if arm.drafter == "lookup"]
    models = [arm for arm in arms if arm.gamma and not arm.drafter.startswith("lookup")]
    if not lookups or not models:
        raise ValueError("The hand rule needs a lookup arm and the arm of a model drafter.")
    otherwise = min(models, key=lambda arm: (arm.gamma < 2, arm.gamma, -list(arms).index(arm)))
    return LookupElseDraft(max(lookups, key=lambda arm: arm.gamma), otherwise, runs=runs)
