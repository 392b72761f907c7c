"""What a round costs on this machine: seconds by arm and by number of drafted tokens.

Filled by a short measurement at start-up and refreshed by every round, since a laptop on battery, a shared host or a longer
context changes it. A round that drafts nothing (a lookup without a match) costs what plain decoding costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from flashspec.records import Arm, Round

Array = Any
STEP = 0.05  # weight of a new measurement
LARGEST_SURPRISE = 0.5  # a measurement counts as at most this share away from the entry: one page fault must not decide


class CostTable:
    """`seconds` [K, G+1]: a round of arm k in which g tokens are drafted. `usual` [K]: its mean round. `catch_up` [K]: an unread token."""

    def __init__(self, arms: Sequence[Arm], seconds: Array, usual: Array | None = None, catch_up: Array | None = None):
        self.arms = tuple(arms)
        self.seconds = np.array(seconds, float)
        if self.seconds.shape[0] != len(self.arms) or not (self.seconds > 0).all():
            raise ValueError("A cost table needs one row of positive seconds for each arm.")
        self.usual = np.array(self.full if usual is None else usual, float)
        self.catch_up = np.zeros(len(self.arms)) if catch_up is None else np.array(catch_up, float)

    @property
    def full(self) -> Array:
        """Seconds of a round that drafts the arm's whole block: [K]."""
        return self.seconds[np.arange(len(self.arms)), [arm.gamma for arm in self.arms]]

    @classmethod
    def constant(cls, seconds: Mapping[Arm, float]) -> CostTable:
        """Every round of an arm costs the same, whatever it drafts: for simulations."""
        longest = max(arm.gamma for arm in seconds)
        return cls(list(seconds), [[value] * (longest + 1) for value in seconds.values()])

    @classmethod
    def measured(cls, arms: Sequence[Arm], rounds: Iterable[Round]) -> CostTable:
        """From rounds of all `arms`: medians of the target's part by block length and of the drafter's part by drafted tokens.

        Lengths that no round had are interpolated. Raises ValueError where an arm has no round.
        """
        rounds = list(rounds)
        longest = max(arm.gamma for arm in arms)
        lengths = np.arange(longest + 1)
        target = _curve(
            lengths, [(len(r.drafted), r.seconds.total - r.seconds.draft - r.seconds.catch_up) for r in rounds]
        )
        seconds, usual, catch_up = [], [], []
        for arm in arms:
            own = [r for r in rounds if r.arm == arm]
            if not own:
                raise ValueError(f"No round of {arm} was measured.")
            drafting = [
                (len(r.drafted), r.seconds.draft)
                for r in rounds
                if r.arm.drafter == arm.drafter and not r.seconds.catch_up  # whose first token is charged as catch-up
            ]
            seconds.append(target + _curve(lengths, [*drafting, (0, 0.0)] if arm.gamma else [(0, 0.0)]))
            usual.append(float(np.mean([r.seconds.total - r.seconds.catch_up for r in own])))
            late = [r for r in rounds if r.arm.drafter == arm.drafter and r.seconds.catch_up > 0]
            catch_up.append(sum(r.seconds.catch_up for r in late) / max(sum(r.caught_up for r in late), 1))
        return cls(arms, seconds, usual, catch_up)

    def refresh(self, chosen: int, drafted: int, seconds: float) -> None:
        """One more measurement: the entry moves, and with it the arms that share its drafter."""
        before = self.seconds[chosen, drafted]
        change = STEP * np.clip(seconds / before - 1, -LARGEST_SURPRISE, LARGEST_SURPRISE)
        same = [k for k, arm in enumerate(self.arms) if arm.drafter == self.arms[chosen].drafter]
        self.seconds[same, drafted] *= 1 + change
        self.usual[chosen] += STEP * (self.seconds[chosen, drafted] - self.usual[chosen])


def _curve(lengths: Array, measured: Sequence[tuple[int, float]]) -> Array:
    """Median by length, straight lines between and beyond the lengths that were seen: [G+1]."""
    seen = sorted({length for length, _ in measured})
    medians = [float(np.median([value for length, value in measured if length == wanted])) for wanted in seen]
    if len(seen) == 1:
        return np.full(len(lengths), medians[0])
    curve = np.interp(lengths, seen, medians)
    slope = (medians[-1] - medians[0]) / (seen[-1] - seen[0])
    return np.where(lengths > seen[-1], medians[-1] + slope * (lengths - seen[-1]), curve)
