"""Bandits for rewards in [0, 1] that do not change: follow-the-leader, ε-greedy, UCB1, UCB2, UCB-V, KL-UCB, Thompson sampling.

n_k: pulls of arm k, S_k: sum of its rewards, t = Σ n_k. An arm that was never pulled is pulled first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flashspec.bandits.base import Context, Outcome, Policy
from flashspec.bandits.rewards import Reward, scaled
from flashspec.records import Arm

Array = Any


class Averaging(Policy):
    """Keeps n_k and S_k. Subclasses add a bonus to the mean S_k / n_k."""

    def __init__(self, arms: Sequence[Arm], reward: Reward, *, runs: int = 1, seed: int = 0, dwell: int = 1) -> None:
        self.reward = reward
        super().__init__(arms, runs=runs, seed=seed, dwell=dwell)

    @property
    def reward_range(self) -> tuple[float, float]:
        return self.reward.range

    def reset(self) -> None:
        super().reset()
        self.sums = np.zeros((self.runs, len(self.arms)))

    def learn(self, chosen: Array, outcome: Outcome) -> None:
        self.take(chosen, scaled(self.reward, chosen, outcome))

    def take(self, chosen: Array, reward: Array) -> None:
        """Learn a reward in [0, 1]: [runs], [runs]."""
        self.sums[np.arange(self.runs), chosen] += reward

    def counts(self) -> Array:
        """n_k, possibly discounted: [runs, K]."""
        return self.pulls

    def means(self) -> Array:
        """S_k / n_k, 0 for an untried arm: [runs, K]."""
        return self.sums / np.maximum(self.counts(), 1e-12) * (self.counts() > 0)

    def bonus(self) -> Array:
        """What is added for ignorance, infinite for an untried arm: [runs, K]."""
        return np.where(self.counts() > 0, 0.0, np.inf)

    def score(self, context: Context) -> Array:
        return self.means() + self.bonus()

    def components(self) -> tuple[Array, Array]:
        """Mean and bonus in the unit of the reward."""
        low, high = self.reward.range
        return low + (high - low) * self.means(), (high - low) * self.bonus()


class FollowTheLeader(Averaging):
    """The best mean so far, no bonus. One unlucky start and it never looks back: kept to show that."""


class EpsilonGreedy(Averaging):
    """The best mean so far, but any arm with probability `epsilon`."""

    def __init__(self, arms: Sequence[Arm], reward: Reward, *, epsilon: float = 0.1, **more: Any) -> None:
        self.epsilon = epsilon
        super().__init__(arms, reward, **more)

    def score(self, context: Context) -> Array:
        explore = self.rng.random((self.runs, 1)) < self.epsilon
        lottery = self.rng.random((self.runs, len(self.arms)))
        return np.where(explore, 2 + lottery, super().score(context))


class UCB1(Averaging):
    """S_k/n_k + √(2 ln t / n_k) (Auer, Cesa-Bianchi, Fischer 2002)."""

    def bonus(self) -> Array:
        return width(2 * np.log(np.maximum(self.rounds, 1))[:, None], self.counts())


class UCB2(Averaging):
    """Epochs: an arm once chosen is kept for τ(r+1) − τ(r) rounds, τ(r) = ⌈(1+α)^r⌉, so there are O(log t) switches (same paper)."""

    alpha = 0.5

    def reset(self) -> None:
        super().reset()
        self._epochs = np.zeros((self.runs, len(self.arms)), int)
        self._current = np.zeros(self.runs, int)
        self._left = np.zeros(self.runs, int)

    def bonus(self) -> Array:
        tau = np.ceil((1 + self.alpha) ** self._epochs)
        log = np.log(np.maximum(np.e * np.maximum(self.rounds, 1)[:, None] / tau, 1))
        return np.where(self.pulls > 0, np.sqrt((1 + self.alpha) * log / (2 * tau)), np.inf)

    def select(self, context: Context = Context()) -> Array:  # noqa: B008 (immutable)
        free = self._left == 0
        choice = np.where(free, super().select(context), self._current)
        rows = np.arange(self.runs)
        epoch = self._epochs[rows, choice]
        length = np.ceil((1 + self.alpha) ** (epoch + 1)) - np.ceil((1 + self.alpha) ** epoch)
        self._left = np.where(free, np.maximum(length, 1).astype(int), self._left) - 1
        self._epochs[rows, choice] += self._left == 0
        self._current = choice
        return choice


class UCBV(Averaging):
    """Mean + √(2 V ζ/n) + 3ζ/n with the empirical variance V, ζ = 1.2 ln t (Audibert, Munos, Szepesvári 2009)."""

    def reset(self) -> None:
        super().reset()
        self._squares = np.zeros((self.runs, len(self.arms)))

    def take(self, chosen: Array, reward: Array) -> None:
        super().take(chosen, reward)
        self._squares[np.arange(self.runs), chosen] += reward**2

    def bonus(self) -> Array:
        n = np.maximum(self.pulls, 1)
        variance = np.maximum(self._squares / n - self.means() ** 2, 0)
        zeta = 1.2 * np.log(np.maximum(self.rounds, 1))[:, None]
        return np.where(self.pulls > 0, np.sqrt(2 * variance * zeta / n) + 3 * zeta / n, np.inf)


class KLUCB(Averaging):
    """The largest q with n_k·kl(S_k/n_k, q) ≤ ln t, by bisection (Garivier & Cappé 2011)."""

    def bonus(self) -> Array:
        mean, n = self.means(), np.maximum(self.pulls, 1)
        budget = np.log(np.maximum(self.rounds, 1))[:, None] / n
        low, high = mean.copy(), np.ones_like(mean)
        for _ in range(32):
            middle = (low + high) / 2
            inside = kl(mean, middle) <= budget
            low, high = np.where(inside, middle, low), np.where(inside, high, middle)
        return np.where(self.pulls > 0, low - mean, np.inf)


class ThompsonSampling(Averaging):
    """Draw each arm's mean from Beta(1 + S, 1 + n − S) and take the largest; rewards inside (0, 1) count by a coin flip."""

    def take(self, chosen: Array, reward: Array) -> None:
        super().take(chosen, (self.rng.random(self.runs) < reward).astype(float))

    def score(self, context: Context) -> Array:
        failures = np.maximum(self.counts() - self.sums, 0)
        return self.rng.beta(1 + self.sums, 1 + failures)

    def components(self) -> tuple[Array, Array]:
        """Posterior mean and standard deviation, in the unit of the reward."""
        low, high = self.reward.range
        a, b = 1 + self.sums, 1 + np.maximum(self.counts() - self.sums, 0)
        mean, deviation = beta_moments(a, b)
        return low + (high - low) * mean, (high - low) * deviation


def beta_moments(a: Array, b: Array) -> tuple[Array, Array]:
    """Mean and standard deviation of Beta(a, b)."""
    return a / (a + b), np.sqrt(a * b / ((a + b) ** 2 * (a + b + 1)))


def kl(p: Array, q: Array) -> Array:
    """Kullback–Leibler divergence of two Bernoulli laws."""
    p, q = np.clip(p, 1e-15, 1 - 1e-15), np.clip(q, 1e-15, 1 - 1e-15)
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


def width(numerator: Array, counts: Array) -> Array:
    """√(numerator / counts), infinite where nothing was counted."""
    return np.where(counts > 0, np.sqrt(np.maximum(numerator, 0) / np.maximum(counts, 1e-12)), np.inf)
