"""Full information: every drafter is scored on the text just written, whoever wrote it (see Evidence in `base`).

Bandit feedback tells about the arm that was played; here all arms learn from every token, and no round is spent on exploring.
The price is one forward of each idle model over the new text, paid every few rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from flashspec.bandits.base import Context, Evidence, Outcome, Rated, gumbel
from flashspec.bandits.costs import CostTable
from flashspec.records import Arm

Array = Any


class _Watching(Rated):
    """Learns from evidence alone; its own rounds only refresh the cost table."""

    feedback: Literal["bandit", "full"] = "full"

    def learn(self, chosen: Array, outcome: Outcome) -> None:
        self.measure(chosen, outcome)

    def values(self, evidence: Evidence | None, k: int, n: int) -> tuple[Array, Array]:
        """Expected tokens and seconds of a round of arm k begun at each of n positions: [n], [n]. No evidence: it drafts nothing."""
        gamma = self.arms[k].gamma
        if evidence is None or gamma == 0:
            return np.ones(n), np.full(n, self.costs.price(k, False, 0))
        drafted = np.minimum(evidence.drafted, gamma)
        return 1 + evidence.survival[:, :gamma].sum(1), self.costs.price(k, evidence.match, drafted)


class ThroughputGreedy(_Watching):
    """Moving averages of tokens and seconds of every arm, and the arm with the best ratio: what serving engines call adaptive.

    A value fades by `memory` with every token of text.
    """

    def __init__(self, arms: Sequence[Arm], costs: CostTable, *, memory: float = 0.98, **more: Any) -> None:
        self.memory = memory
        super().__init__(arms, costs, **more)

    def reset(self) -> None:
        super().reset()
        shape = (self.runs, len(self.arms))
        self._tokens, self._seconds = np.zeros(shape), np.zeros(shape)

    def score(self, context: Context) -> Array:
        half = 1 + self.gammas / 2  # before any evidence: half of every block is accepted
        return (self._tokens + 1e-3 * half) / (self._seconds + 1e-3 * self.costs.usual)

    def observe(self, evidence: Mapping[str, Evidence]) -> None:
        n = max(len(e.drafted) for e in evidence.values())
        fade = self.memory ** np.arange(n - 1, -1, -1)
        for k, arm in enumerate(self.arms):
            tokens, seconds = self.values(evidence.get(arm.drafter), k, n)
            self._tokens[:, k] = self.memory**n * self._tokens[:, k] + fade @ tokens
            self._seconds[:, k] = self.memory**n * self._seconds[:, k] + fade @ seconds


class Hedge(_Watching):
    """Exponential weights on the losses of all arms at every position, with fixed share (Herbster & Warmuth 1998).

    The loss of an arm at a position is the share of the best possible rate that it does not reach there. Regret after n steps of losses in
    [0, 1]: at most √(n ln K / 2) with η = √(8 ln K / n) and no share.
    """

    def __init__(
        self, arms: Sequence[Arm], costs: CostTable, *, eta: float = 0.5, share: float = 0.01, **more: Any
    ) -> None:
        self.eta, self.share = eta, share
        super().__init__(arms, costs, **more)

    def reset(self) -> None:
        super().reset()
        self.weights = np.full((self.runs, len(self.arms)), 1 / len(self.arms))

    def score(self, context: Context) -> Array:
        """Log-weight plus Gumbel noise: the largest is a draw from the weights."""
        return gumbel(self.weights, self.rng)

    def components(self) -> tuple[Array, Array]:
        """Weight of every arm; there is no bonus."""
        return self.weights, np.zeros_like(self.weights)

    def observe(self, evidence: Mapping[str, Evidence]) -> None:
        n = max(len(e.drafted) for e in evidence.values())
        best = (self.gammas.max() + 1) / self.costs.seconds.min()
        values = [self.values(evidence.get(arm.drafter), k, n) for k, arm in enumerate(self.arms)]
        rates = np.stack([tokens / seconds for tokens, seconds in values], 1)  # [n, K]
        for losses in 1 - rates / best:
            self.suffer(np.broadcast_to(losses, self.weights.shape))

    def suffer(self, losses: Array) -> None:
        """One step with the losses [runs, K] of all arms, each in [0, 1]."""
        self.weights = self.weights * np.exp(-self.eta * losses)
        self.weights /= self.weights.sum(1, keepdims=True)
        self.weights = (1 - self.share) * self.weights + self.share / len(self.arms)
