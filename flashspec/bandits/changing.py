"""Bandits for rewards that change: EXP3, EXP3.S, sliding-window and discounted UCB, discounted Thompson sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flashspec.bandits.base import Context, gumbel
from flashspec.bandits.rewards import Reward
from flashspec.bandits.stochastic import Averaging, ThompsonSampling, width
from flashspec.records import Arm

Array = Any


class EXP3(Averaging):
    """Exponential weights on importance-weighted losses, η_t = √(ln K/(K t)): regret ≤ 2√(n K ln K) against any sequence."""

    def reset(self) -> None:
        super().reset()
        self._losses = np.zeros((self.runs, len(self.arms)))
        self._chance = np.full((self.runs, len(self.arms)), 1 / len(self.arms))

    def chances(self) -> Array:
        """Probability of every arm: [runs, K]."""
        eta = np.sqrt(np.log(len(self.arms)) / (len(self.arms) * (self.rounds + 1)))[:, None]
        weights = np.exp(-eta * (self._losses - self._losses.min(1, keepdims=True)))
        return weights / weights.sum(1, keepdims=True)

    def score(self, context: Context) -> Array:
        """Log-chance plus Gumbel noise: the largest is a draw from the chances."""
        self._chance = self.chances()
        return gumbel(self._chance, self.rng)

    def take(self, chosen: Array, reward: Array) -> None:
        super().take(chosen, reward)
        rows = np.arange(self.runs)
        self._losses[rows, chosen] += (1 - reward) / self._chance[rows, chosen]

    def components(self) -> tuple[Array, Array]:
        """Chance of every arm; there is no bonus."""
        return self._chance, np.zeros_like(self._chance)


class EXP3S(EXP3):
    """EXP3 whose weights leak into each other, so that it follows the best *sequence* of arms (Auer et al. 2002, SIAM J. Comput.)."""

    mixing, share = 0.07, 1e-3

    def reset(self) -> None:
        super().reset()
        self._weights = np.ones((self.runs, len(self.arms)))

    def chances(self) -> Array:
        weights = self._weights / self._weights.sum(1, keepdims=True)
        return (1 - self.mixing) * weights + self.mixing / len(self.arms)

    def take(self, chosen: Array, reward: Array) -> None:
        Averaging.take(self, chosen, reward)
        rows, arms = np.arange(self.runs), len(self.arms)
        leak = np.e * self.share / arms * self._weights.sum(1, keepdims=True)
        self._weights[rows, chosen] *= np.exp(self.mixing / arms * reward / self._chance[rows, chosen])
        self._weights += leak
        self._weights /= self._weights.sum(1, keepdims=True)


class SlidingWindowUCB(Averaging):
    """UCB on the last `window` rounds (Garivier & Moulines 2011)."""

    def __init__(self, arms: Sequence[Arm], reward: Reward, *, window: int = 200, xi: float = 0.3, **more: Any) -> None:
        self.window, self.xi = window, xi
        super().__init__(arms, reward, **more)

    def reset(self) -> None:
        super().reset()
        self._arms = np.full((self.runs, self.window), -1)
        self._rewards = np.zeros((self.runs, self.window))
        self._inside = np.zeros((self.runs, len(self.arms)), int)

    def counts(self) -> Array:
        return self._inside

    def take(self, chosen: Array, reward: Array) -> None:
        super().take(chosen, reward)
        rows, slot = np.arange(self.runs), (self.rounds - 1) % self.window
        old = self._arms[rows, slot]
        there = old >= 0
        self.sums[rows[there], old[there]] -= self._rewards[rows, slot][there]
        self._inside[rows[there], old[there]] -= 1
        self._inside[rows, chosen] += 1
        self._arms[rows, slot], self._rewards[rows, slot] = chosen, reward

    def bonus(self) -> Array:
        horizon = np.minimum(np.maximum(self.rounds, 1), self.window)[:, None]
        return width(self.xi * np.log(horizon), self.counts())


class _Fading(Averaging):
    """Counts and sums fade by `discount` a round."""

    discount: float

    def reset(self) -> None:
        super().reset()
        self._faded = np.zeros((self.runs, len(self.arms)))

    def counts(self) -> Array:
        return self._faded

    def take(self, chosen: Array, reward: Array) -> None:
        self.sums *= self.discount
        self._faded *= self.discount
        super().take(chosen, reward)
        self._faded[np.arange(self.runs), chosen] += 1


class DiscountedUCB(_Fading):
    """UCB on fading counts (Garivier & Moulines 2011)."""

    def __init__(
        self, arms: Sequence[Arm], reward: Reward, *, discount: float = 0.995, xi: float = 0.3, **more: Any
    ) -> None:
        self.discount, self.xi = discount, xi
        super().__init__(arms, reward, **more)

    def bonus(self) -> Array:
        return width(self.xi * np.log(np.maximum(self.counts().sum(1, keepdims=True), 1)), self.counts())


class DiscountedThompson(_Fading, ThompsonSampling):
    """Thompson sampling on fading counts (Raj & Kalyani 2017)."""

    def __init__(self, arms: Sequence[Arm], reward: Reward, *, discount: float = 0.99, **more: Any) -> None:
        self.discount = discount
        super().__init__(arms, reward, **more)
