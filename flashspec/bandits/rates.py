"""Policies whose objective is the rate itself, tokens ÷ seconds: RateUCB, RateThompson, GeometricThompson, ContextualThompson.

Y: tokens of a round, C: its seconds. "Always arm k" delivers ρ_k = E[Y]/E[C] tokens a second (renewal–reward), so statistics are kept
of sums, never of single rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flashspec.bandits.base import Context, Outcome, Rated
from flashspec.bandits.costs import CostTable, sources
from flashspec.bandits.stochastic import beta_moments
from flashspec.records import Arm

Array = Any

PRIOR = 4.0  # imagined observations of a depth, spread by the acceptance of all depths of its source
HOPE = (
    4.0,
    2.0,
)  # imagined acceptances and refusals of a source: a drafter that is worth having is right two times of three
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
        pairs = [sources(arm) for arm in arms]  # who drafts with a match, who without
        self._sources = list(dict.fromkeys(source for pair in pairs for source in pair))
        self._who = np.array(
            [[self._sources.index(pair[side]) for pair in pairs] for side in (1, 0)]
        )  # [2, K], 1: with a match
        self._is_lookup = np.array([source == "lookup" for source in self._sources])
        self._depth = max(max(arm.gamma for arm in arms), 1)
        self.discount, self.memory, self.sharpness = discount, memory, sharpness
        # A choice is made in every round, beside models that leave nothing in the processor's caches: what does not change is looked
        # up in tables, so that a round costs few numpy calls.
        source, place = np.arange(len(self._sources)), np.arange(self.bins)[:, None]
        seen = np.where(
            self._is_lookup, place, np.minimum(place, 1)
        )  # a model only sees whether there is a match at all
        self._cells = source * self.bins + seen  # [bins, S] row of every source in the present context
        self._drafts = np.where(
            np.array([[pair[side] is None for pair in pairs] for side in (1, 0)]), 0.0, 1.0
        )  # [2, K]
        self._drafts *= np.array([arm.gamma > 0 for arm in arms])
        self._ends = self._who * self._depth + np.array(
            [max(arm.gamma - 1, 0) for arm in arms]
        )  # [2, K] in [S · depth]
        depth = np.arange(self._depth)
        self._passed = (depth < np.arange(self._depth + 1)[:, None]).astype(float)  # [k, depth] k accepted tokens
        self._failed = (depth == np.arange(self._depth + 1)[:, None]).astype(
            float
        )  # [k, depth] refused behind k; the last row: none
        super().__init__(arms, costs, **more)

    def reset(self) -> None:
        super().reset()
        costs, count = self.costs, len(self._sources)
        self._accepted, self._refused = (np.zeros((self.runs * count * self.bins, self._depth)) for _ in range(2))
        self._first = np.arange(self.runs) * count * self.bins  # first row of every run
        self._match = np.zeros(self.runs, int)  # 1 where lookup has a match
        self._context: Array = np.zeros(self.runs, int)
        self._tokens, self._seconds = np.zeros(self.runs), np.zeros(self.runs)
        self._prices = np.stack([costs.places(match) for match in (False, True)])  # [2, K] in the table's seconds
        drafted = np.stack([costs.drafts(match) for match in (False, True)])
        # A lookup that found a match pays no model.
        self._asleep = (
            (~self._is_lookup[self._who] & (drafted > 0)) * costs.catch_up / STAY
        )  # [2, K] seconds an unread token

    def score(self, context: Context) -> Array:
        self._look(context.match_length)
        a, b = self._posterior()
        expected, cost = self._expected(self.rng.beta(a, b)), self._cost(context)
        known = self._seconds > 0
        if known.all():
            rho = self._tokens / self._seconds
        else:
            rho = np.where(known, self._tokens / np.where(known, self._seconds, 1), (expected / cost).max(1))
        return expected - rho[:, None] * cost

    def components(self) -> tuple[Array, Array]:
        """Rate at the posterior means in the present context, and half the spread between ± one standard deviation."""
        a, b = self._posterior()
        mean, deviation = beta_moments(a, b)
        cost = self._cost(Context())
        low, middle, high = (self._expected(np.clip(mean + s * deviation, 0, 1)) / cost for s in (-1, 0, 1))
        return middle, (high - low) / 2

    def learn(self, chosen: Array, outcome: Outcome) -> None:
        self._look(outcome.match_length)
        source = self._who[self._match, chosen]
        drafted = np.where(self._is_lookup[source], 0, outcome.drafted)  # a lookup's own rounds are among its hits
        self._count(source, outcome.accepted, drafted)
        if "lookup" in self._sources:
            self._count(np.full(self.runs, self._sources.index("lookup")), outcome.hits, outcome.judged)
        self._tokens = self.memory * self._tokens + outcome.tokens
        self._seconds = self.memory * self._seconds + outcome.seconds + outcome.catch_up
        self.measure(chosen, outcome, match=bool(self._match[0]))

    def _look(self, match_length: Array) -> None:
        """Take this as the present context."""
        found = context_bin(match_length, self.bins)
        self._context = found if len(found) == self.runs else np.broadcast_to(found, self.runs)
        self._match = np.minimum(self._context, 1)

    def _count(self, source: Array, accepted: Array, judged: Array) -> None:
        """Add to the cells of `source` that this many leading tokens were accepted of those that were judged; all [runs]."""
        live = judged > 0
        if not live.any():
            return
        row = (self._first + self._cells[self._context, source])[live]
        accepted, judged = accepted[live], judged[live]
        self._accepted[row] = self.discount * self._accepted[row] + self._passed[accepted]
        failed = self._failed[np.where(accepted < judged, accepted, self._depth)]
        self._refused[row] = self.discount * self._refused[row] + failed

    def _posterior(self) -> tuple[Array, Array]:
        """Beta parameters of every source and depth in the present context: [runs, S, depth] twice."""
        rows = self._first[:, None] + self._cells[self._context]
        accepted, refused = self._accepted.take(rows, 0), self._refused.take(rows, 0)
        total = accepted.sum(-1, keepdims=True)
        pooled = (HOPE[0] + total) / (sum(HOPE) + total + refused.sum(-1, keepdims=True))
        prior = PRIOR * pooled
        return self.sharpness * (prior + accepted), self.sharpness * (PRIOR - prior + refused)

    def _expected(self, chances: Array) -> Array:
        """Tokens of a round for every arm in the present context: [runs, S, depth] -> [runs, K]."""
        survival = chances.cumprod(-1).cumsum(-1)  # accepted tokens expected of a block of 1, 2, … depth
        first = np.arange(self.runs)[:, None] * (len(self._sources) * self._depth)
        return 1 + survival.take(first + self._ends[self._match]) * self._drafts[self._match]

    def _cost(self, context: Context) -> Array:
        """Seconds of the round of every arm in the present context: [runs, K]."""
        return self.costs.seconds.take(self._prices[self._match]) + self._asleep[self._match] * context.unread


def context_bin(match_length: Array, bins: int) -> Array:
    """0 without a match, then one bin for each length from 2, the last for all longer ones."""
    return np.minimum(np.maximum(match_length - 1, 0), bins - 1)
