"""Policies: which arm (drafter, γ) the next round uses. numpy at most; no torch, no models in here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from flashspec.records import Arm, Round


class Policy(Protocol):
    """Chooses an arm before each round and learns from the round afterwards."""

    def select(self) -> Arm:
        """The arm of the next round."""

    def update(self, round: Round) -> None:
        """Learn from a finished round."""

    def indices(self) -> Mapping[str, float] | None:
        """The index of every arm that the next choice compares, or None where nothing is compared."""


class Fixed:
    """Always the same arm."""

    def __init__(self, arm: Arm) -> None:
        self._arm = arm

    def select(self) -> Arm:
        return self._arm

    def update(self, round: Round) -> None:
        return None

    def indices(self) -> None:
        return None
