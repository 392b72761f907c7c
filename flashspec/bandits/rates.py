"""Policies whose objective is the rate itself, tokens ÷ seconds: RateUCB, RateThompson, GeometricThompson, ContextualThompson.

Y: tokens of a round, C: its seconds. "Always arm k" delivers ρ_k = E[Y]/E[C] tokens a second (renewal–reward), so statistics are kept
of sums, never of single rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flashspec.bandits import loops
from flashspec.bandits.base import Context, Outcome, Rated
from flashspec.bandits.costs import CostTable, sources
from flashspec.bandits.stochastic import beta_moments
from flashspec.records import Arm

Array = Any

STAY = 32  # rounds over which the seconds of a catch-up are spread when arms are compared


class _Measuring(Rated):
    """Keeps ΣY, ΣC and their second moments per arm."""

    def reset(self) -> None:
        super().reset()
        shape = (self.runs, len(self.arms))
        self._y, self._c, self._yy, self._yc, self._cc = (np.zeros(shape) for _ in range(5))

    def learn(self, chosen: Array, outcome: Outcome) -> None:
        rows, y = np.arange(self.runs), outcome.tokens
        c = outcome.seconds + outcome.catch_up
        for total, value in ((self._y, y), (self._c, c), (self._yy, y * y), (self._yc, y * c), (self._cc, c * c)):
            total[rows, chosen] += value

    def rates(self) -> Array:
        """ΣY / ΣC, starting from what the table and one accepted half block would give: [runs, K]."""
        return (self._y + self._prior_tokens()) / (self._c + self.costs.usual)

    def deviations(self) -> Array:
        """Standard error of the rate by the delta method, √(Var(Y − ρC)/n)/E[C]: [runs, K]."""
        rho = self.rates()
        squares = self._yy - 2 * rho * self._yc + rho**2 * self._cc
        n = self.pulls + 1
        prior = (self.gammas + 1) ** 2 / 12  # one imagined round, any length of the block equally likely
        return np.sqrt((np.maximum(squares, 0) + prior) / n) / np.sqrt(n) / ((self._c + self.costs.usual) / n)

    def _prior_tokens(self) -> Array:
        return 1 + self.gammas / 2


class RateUCB(_Measuring):
    """ρ̂ + √(2 ln t)·σ̂(ρ̂): UCB on the ratio, its width by the delta method."""

    def score(self, context: Context) -> Array:
        estimate, bonus = self.components()
        return np.where(self.pulls == 0, np.inf, estimate + bonus)

    def components(self) -> tuple[Array, Array]:
        """Rate and width in tokens per second."""
        return self.rates(), np.sqrt(2 * np.log(np.maximum(self.rounds, 1)))[:, None] * self.deviations()


class RateThompson(_Measuring):
    """A draw from Normal(ρ̂, σ̂(ρ̂)²) for every arm."""

    def score(self, context: Context) -> Array:
        estimate, deviation = self.components()
        return estimate + deviation * self.rng.standard_normal(estimate.shape)

    def components(self) -> tuple[Array, Array]:
        """Rate and its standard error in tokens per second."""
        return self.rates(), self.deviations()


class GeometricThompson(Rated):
    """Thompson sampling on the acceptance α of one drafted token, a Beta posterior that all block lengths of a drafter share.

    A round that accepts k of n drafted tokens is k successes and, if k < n, one failure. With m, the share of rounds in which the drafter
    proposes anything (a Beta posterior too), E[Y] = 1 + m(α + … + α^γ), and the tabled cost gives the rate. `discount` per round forgets.
    """

    waits = False

    def __init__(
        self,
        arms: Sequence[Arm],
        costs: CostTable,
        *,
        discount: float = 1.0,
        **more: Any,
    ) -> None:
        names = list(dict.fromkeys(arm.drafter for arm in arms))
        self._drafter = np.array([names.index(arm.drafter) for arm in arms])  # [K]
        self._names, self.discount = names, discount
        super().__init__(arms, costs, **more)

    def reset(self) -> None:
        super().reset()
        shape = (self.runs, len(self._names))
        self._accepted, self._refused, self._proposed, self._silent = (np.zeros(shape) for _ in range(4))

    def learn(self, chosen: Array, outcome: Outcome) -> None:
        rows, who = np.arange(self.runs), self._drafter[chosen]
        for counts in (self._accepted, self._refused, self._proposed, self._silent):
            counts *= self.discount
        self._accepted[rows, who] += outcome.accepted
        self._refused[rows, who] += outcome.accepted < outcome.drafted
        self._proposed[rows, who] += outcome.drafted > 0
        self._silent[rows, who] += outcome.drafted == 0
        self.measure(chosen, outcome)

    def score(self, context: Context) -> Array:
        alpha = self.rng.beta(1 + self._accepted, 1 + self._refused)
        proposes = self.rng.beta(1 + self._proposed, 1e-3 + self._silent)  # believed to propose until it fails to
        return self._rate(alpha, proposes, context)

    def components(self) -> tuple[Array, Array]:
        """Rate at the posterior means, and the half width between the rates at α ± one standard deviation."""
        a, b = 1 + self._accepted, 1 + self._refused
        mean, deviation = beta_moments(a, b)
        proposes = (1 + self._proposed) / (1 + self._proposed + 1e-3 + self._silent)
        low, middle, high = (self._rate(np.clip(mean + s * deviation, 0, 1), proposes, Context()) for s in (-1, 0, 1))
        return middle, (high - low) / 2

    def _rate(self, alpha: Array, proposes: Array, context: Context) -> Array:
        """Tokens per second of every arm: [runs, D], [runs, D] -> [runs, K]."""
        alpha, m = alpha[:, self._drafter], proposes[:, self._drafter]
        accepted = _geometric(alpha, self.gammas)
        return (1 + m * accepted) / (self.costs.usual + self.costs.catch_up * context.unread / STAY)


def _geometric(alpha: Array, gammas: Array) -> Array:
    """α + α² + … + α^γ: [runs, K], [K] -> [runs, K]."""
    one = alpha >= 1 - 1e-9
    return np.where(one, gammas, alpha * (1 - alpha**gammas) / np.where(one, 1, 1 - alpha))


class ContextualThompson(Rated):
    """Thompson sampling that looks at the lookup's match first: who drafts, how far, may differ with the length of the match.

    For every source (lookup, each model), context and depth it keeps a Beta posterior on "accepted, given that all before were": the
    product-limit form of the expected tokens, right also where acceptance comes all or nothing. Depths without data lean on the
    source's pooled acceptance. What lookup would have done is seen in every round, whoever drafted.

    The choice maximises E[Y|z] − ρ·c(z) with the rate ρ that the policy itself delivers: where the context flips from round to round,
    taking the best *rate* of each context is not the fastest way to finish a text. `discount` forgets, per observation of a cell;
    `sharpness` draws from a posterior that many times surer, which explores less (Chapelle & Li 2011).
    Draws are normal with the posterior's mean and deviation, cut to [0, 1]: one call for all of them, which a round of 2 ms feels.
    """

    waits = False
    bins = 6  # no match, a match of 2, 3, 4, 5, of 6 or more tokens

    def __init__(
        self,
        arms: Sequence[Arm],
        costs: CostTable,
        *,
        discount: float = 0.99,
        memory: float = 0.98,
        sharpness: float = 3.0,
        **more: Any,
    ) -> None:
        self.discount, self.memory, self.sharpness = discount, memory, sharpness
        pairs = [(without, with_match) for with_match, without in map(sources, arms)]
        index = {source: n for n, source in enumerate(dict.fromkeys(s for pair in pairs for s in pair if s))}
        who = [[index.get(pair[side] or "", -1) for pair in pairs] for side in (0, 1)]
        models = [[pair[side] not in (None, "lookup") for pair in pairs] for side in (0, 1)]
        self._layout = loops.Layout(
            np.array(who),
            costs.gammas,
            np.array([source == "lookup" for source in index], bool),
            np.stack([costs.places(match) for match in (False, True)]),
            np.array(models) * costs.catch_up / STAY,  # a lookup that found a match pays no model
        )
        super().__init__(arms, costs, **more)

    def reset(self) -> None:
        super().reset()
        count, depth = len(self._layout.is_lookup), max(self.gammas.max(), 1)
        self._shape = (self.runs, count, depth)
        accepted, refused = (np.zeros((self.runs, count, self.bins, depth)) for _ in range(2))
        self._memory = loops.Memory(accepted, refused, np.zeros(self.runs), np.zeros(self.runs))
        self._place = np.zeros(self.runs, np.int64)  # the present context

    def score(self, context: Context) -> Array:
        self._place[:] = context_bin(context.match_length, self.bins)
        noise = self.rng.standard_normal(self._shape)
        return loops.advantages(*self._prospects(context.unread, noise), self._memory)

    def components(self) -> tuple[Array, Array]:
        """Rate at the posterior means in the present context, and half the spread between ± one standard deviation."""
        low, middle, high = (np.divide(*self._prospects(0, np.full(self._shape, by))) for by in (-1.0, 0.0, 1.0))
        return middle, (high - low) / 2

    def learn(self, chosen: Array, outcome: Outcome) -> None:
        self._place[:] = context_bin(outcome.match_length, self.bins)
        counts = np.empty((self.runs, 5), np.int64)
        seen = (outcome.tokens, outcome.drafted, outcome.accepted, outcome.hits, outcome.judged)
        for column, values in enumerate(seen):
            counts[:, column] = values
        seconds = outcome.seconds + outcome.catch_up
        loops.learn(self._memory, self._layout, chosen, self._place, counts, seconds, self.discount, self.memory)
        self.measure(chosen, outcome, match=bool(self._place[0]))

    def _prospects(self, unread: Array | int, noise: Array) -> tuple[Array, Array]:
        """Tokens and seconds expected of every arm in the present context: noise [runs, S, G] -> [runs, K] twice."""
        late = np.empty(self.pulls.shape, np.int64)
        late[:] = unread
        table = self.costs.seconds.reshape(-1)
        return loops.prospects(self._memory, self._layout, table, self._place, late, self.sharpness, noise)


def context_bin(match_length: Array, bins: int) -> Array:
    """0 without a match, then one bin for each length from 2, the last for all longer ones."""
    return np.minimum(np.maximum(match_length - 1, 0), bins - 1)
