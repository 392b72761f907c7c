"""What a round costs on this machine: seconds by who drafts and by number of drafted tokens.

Filled by a short measurement at start-up and refreshed by every round, since a laptop on battery, a shared host or a longer
context changes it. A round that drafts nothing (a lookup without a match) costs what plain decoding costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from flashspec.records import Arm, Round

Array = Any
STEP = 0.05  # weight of a new measurement for its own entry
DRIFT = 0.03  # and for all others: what slows one round, a busy host or a laptop on battery, slows them all
LARGEST_SURPRISE = 0.5  # a measurement counts as at most this share away from the entry: one page fault must not decide


class CostTable:
    """Seconds of a round by source, one of "plain", "lookup" or a model, and by number of drafted tokens.

    seconds {source: [G+1]}, row "plain" included; usual [K]: an arm's mean round; catch_up {source: seconds for an unread token}.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        seconds: Mapping[str, Sequence[float]],
        usual: Array | None = None,
        catch_up: Mapping[str, float] | None = None,
    ) -> None:
        self.arms = tuple(arms)
        self.names = tuple(seconds)
        self.seconds = np.array(list(seconds.values()), float)  # [S, G+1]
        wanted = {source or "plain" for arm in arms for source in sources(arm)}
        if missing := wanted - set(seconds):
            raise ValueError(f"The cost table has no row for {min(missing)}.")
        if not (self.seconds > 0).all():
            raise ValueError("A cost table needs positive seconds.")
        rows = [[self.names.index(source or "plain") for source in sources(arm)] for arm in arms]
        self._rows = np.array(rows)  # [K, 2] the row of an arm where lookup has a match, and where it has none
        self.gammas = np.array([arm.gamma for arm in arms])
        self._drafts = [np.where([sources(arm)[side] is None for arm in arms], 0, self.gammas) for side in (0, 1)]
        typical = (
            self.price(self.every, True, self.drafts(True)) + self.price(self.every, False, self.drafts(False))
        ) / 2
        self.usual = typical if usual is None else np.array(usual, float)
        late = catch_up or {}
        self.catch_up = np.array([late.get(sources(arm)[1] or "", 0.0) for arm in arms])  # [K]

    @property
    def every(self) -> Array:
        return np.arange(len(self.arms))

    def drafts(self, match: bool) -> Array:
        """Tokens that each arm drafts where lookup has a match, or has none: [K]."""
        return self._drafts[0 if match else 1]

    def places(self, match: bool) -> Array:
        """Where in the flattened `seconds` each arm's price stands, with a lookup match or without: [K]."""
        return self._rows[:, 0 if match else 1] * self.seconds.shape[1] + self.drafts(match)

    def price(self, arm: Array, match: Array, drafted: Array) -> Array:
        """Seconds of a round of arm index `arm` that drafts so many tokens, with a lookup match or without; arrays broadcast."""
        return self.seconds[self._rows[arm, np.where(match, 0, 1)], drafted]

    @classmethod
    def constant(cls, seconds: Mapping[Arm, float]) -> CostTable:
        """Every round of an arm costs the same, whatever it drafts: for simulations."""
        lengths = np.arange(max(arm.gamma for arm in seconds) + 1)
        everyone = {source or "plain" for arm in seconds for source in sources(arm)}
        own = {name: [(arm.gamma, s) for arm, s in seconds.items() if name in sources(arm)] for name in everyone}
        mean = float(np.mean(list(seconds.values())))
        return cls(
            list(seconds),
            {name: _curve(lengths, own[name] or [(0, mean)]) for name in everyone},
            list(seconds.values()),
        )

    @classmethod
    def measured(cls, arms: Sequence[Arm], rounds: Iterable[Round]) -> CostTable:
        """From rounds of every source: medians of the target's part by block length and of the drafter's part by drafted tokens.

        Lengths that no round had are interpolated. Raises ValueError where a source has no round.
        """
        rounds = list(rounds)
        lengths = np.arange(max(arm.gamma for arm in arms) + 1)
        others = [(len(r.drafted), r.seconds.total - r.seconds.draft - r.seconds.catch_up) for r in rounds]
        target = _curve(lengths, others)
        seconds, catch_up = {"plain": target}, {}
        for name in dict.fromkeys(source for arm in arms for source in sources(arm) if source):
            own = [r for r in rounds if r.arm.drafter == name]
            # Where it had to catch up, its first token hides in there.
            drafting = [(len(r.drafted), r.seconds.draft) for r in own if not r.seconds.catch_up]
            if not drafting:
                raise ValueError(f"No round of {name} was measured.")
            draft = _curve(lengths, [*drafting, (0, 0.0)])
            seconds[name] = target + draft
            # A catch-up also gives the first draft, which the round then does not pay again: only what is beyond that is its price.
            late = [r for r in own if r.seconds.catch_up]
            beyond = sum(r.seconds.catch_up - draft[1] for r in late)
            catch_up[name] = max(beyond, 0.0) / max(sum(r.caught_up for r in late), 1)
        return cls(arms, seconds, None, catch_up)

    def refresh(self, chosen: int, match: bool | None, drafted: int, seconds: float) -> None:
        """One more measurement. match None: it is not known who drafted, so only the arm's mean moves, unless both are the same."""
        usual = float(self.usual[chosen])
        self.usual[chosen] = usual + 2 * STEP * (min(seconds, 3 * usual) - usual)
        with_match, without = self._rows[chosen]
        if match is None and with_match != without and drafted:
            return
        row = with_match if match else without
        change = seconds / float(self.seconds[row, drafted]) - 1
        change = min(max(change, -LARGEST_SURPRISE), LARGEST_SURPRISE)
        self.seconds *= 1 + DRIFT * change
        self.usual *= 1 + DRIFT * change
        self.seconds[row, drafted] *= 1 + STEP * change
        if drafted == 0:  # nothing was drafted, so it tells of every source
            self.seconds[:, 0] = self.seconds[row, 0]


def sources(arm: Arm) -> tuple[str | None, str | None]:
    """Who drafts for an arm where lookup has a match, and where it has none; None drafts nothing."""
    if arm.drafter == "plain" or arm.gamma == 0:
        return None, None
    if arm.drafter == "lookup":
        return "lookup", None
    if arm.drafter.startswith("lookup-else-"):
        return "lookup", arm.drafter.removeprefix("lookup-else-")
    return arm.drafter, arm.drafter


def _curve(lengths: Array, measured: Sequence[tuple[int, float]]) -> Array:
    """Median by length, straight lines between and beyond the lengths that were seen: [G+1]."""
    seen = sorted({length for length, _ in measured})
    medians = [float(np.median([value for length, value in measured if length == wanted])) for wanted in seen]
    if len(seen) == 1:
        return np.full(len(lengths), medians[0])
    curve = np.interp(lengths, seen, medians)
    slope = max(medians[-1] - medians[0], 0.0) / (seen[-1] - seen[0])
    return np.where(lengths > seen[-1], medians[-1] + slope * (lengths - seen[-1]), curve)
