"""Worlds in which every mean is known, so that regret is exact: the test bed of the policies and the arena of the page.

A world plays `runs` games at once. Time runs in *tokens of text*: where a world changes, it changes at a position of the text, so that
all policies meet the same text however many rounds they need for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from flashspec.bandits.base import Context, Evidence, Outcome, Policy
from flashspec.bandits.costs import sources
from flashspec.records import Arm

Array = Any


class World(Protocol):
    """`lost`: seconds that the last choice is expected to have lost against the best arm there: [runs]."""

    arms: tuple[Arm, ...]
    lost: Array

    def reset(self, runs: int, seed: int) -> None:
        """Begin `runs` games."""

    def context(self) -> Context:
        """What a policy may know before it chooses."""

    def play(self, chosen: Array) -> Outcome:
        """One round of every game."""


@dataclass(frozen=True)
class History:
    """Games that were played: arrays [rounds, runs]."""

    chosen: Array
    tokens: Array
    seconds: Array
    lost: Array

    def pulls(self, arms: int) -> Array:
        """How often each arm was chosen: [runs, K]."""
        return np.stack([(self.chosen == k).sum(0) for k in range(arms)], 1)


def play(policy: Policy, world: World, rounds: int, seed: int = 0) -> History:
    """Let `policy` play `rounds` rounds in all its games."""
    world.reset(policy.runs, seed)
    rows = []
    for _ in range(rounds):
        chosen = policy.select(world.context())
        outcome = world.play(chosen)
        policy.update(chosen, outcome)
        rows.append((chosen, outcome.tokens, outcome.seconds + outcome.catch_up, world.lost))
    return History(*(np.stack(column) for column in zip(*rows, strict=True)))


class _Seeded:
    """The random stream of a world, apart from the policy's."""

    def reset(self, runs: int, seed: int) -> None:
        self.runs, self.rng = runs, np.random.default_rng((seed, 1))
        self.lost = np.zeros(runs)

    def context(self) -> Context:
        return Context()

    def _outcome(self, tokens: Array, seconds: Array, drafted: Array, accepted: Array) -> Outcome:
        return Outcome(tokens, seconds, drafted, accepted, np.zeros(self.runs))


class Bernoulli(_Seeded):
    """The textbook: arm k emits a token with chance means[k], every round lasts a second. `lost` is the gap of the means."""

    def __init__(self, means: Sequence[float]) -> None:
        self.means = np.array(means)
        self.arms = tuple(Arm(f"arm {k}", 0) for k in range(len(means)))

    def play(self, chosen: Array) -> Outcome:
        tokens = (self.rng.random(self.runs) < self.means[chosen]).astype(float)
        self.lost = self.means.max() - self.means[chosen]
        nothing = np.zeros(self.runs, int)
        return self._outcome(tokens, np.ones(self.runs), nothing, nothing)


class Piecewise(Bernoulli):
    """Bernoulli arms whose means change at given positions of the text: {first token: means}. A round is one token of text."""

    def __init__(self, regimes: Mapping[int, Sequence[float]]) -> None:
        self.starts = np.array(sorted(regimes))
        self.table = np.array([regimes[start] for start in sorted(regimes)])
        super().__init__(self.table[0])

    def reset(self, runs: int, seed: int) -> None:
        super().reset(runs, seed)
        self.position = np.zeros(runs, int)

    def play(self, chosen: Array) -> Outcome:
        regime = np.searchsorted(self.starts, self.position, side="right") - 1
        means = self.table[regime]  # [runs, K]
        tokens = (self.rng.random(self.runs) < means[np.arange(self.runs), chosen]).astype(float)
        self.lost = means.max(1) - means[np.arange(self.runs), chosen]
        self.position += 1
        nothing = np.zeros(self.runs, int)
        return self._outcome(tokens, np.ones(self.runs), nothing, nothing)


class Mixture(_Seeded):
    """Arms whose rounds are a mixture of kinds, each (chance, acceptance of a token, tokens drafted, seconds of the round).

    One kind an arm is the truncated geometric law: E[Y] = (1 − α^{γ+1})/(1 − α). Several kinds make tokens and seconds of a round
    correlated, as for "lookup, else a model", and then the mean of Y/C is not the rate.
    """

    def __init__(self, kinds: Mapping[Arm, Sequence[tuple[float, float, int, float]]]) -> None:
        self.arms = tuple(kinds)
        most = max(len(rows) for rows in kinds.values())
        padded = [[*rows, *[(0.0, 0.0, 0, 1.0)] * (most - len(rows))] for rows in kinds.values()]
        table = np.array(padded, float)  # [K, kinds, 4]
        self._chance, self._alpha, self._drafted, self._seconds = np.moveaxis(table, 2, 0)
        emitted = 1 + sum(self._alpha**i * (i <= self._drafted) for i in range(1, int(self._drafted.max()) + 1))
        self.tokens = (self._chance * emitted).sum(1)  # E[Y] of every arm
        self.seconds = (self._chance * self._seconds).sum(1)  # E[C]
        self.rates = self.tokens / self.seconds

    def play(self, chosen: Array) -> Outcome:
        kind = (self.rng.random(self.runs)[:, None] > self._chance[chosen].cumsum(1)[:, :-1]).sum(1)
        alpha, drafted = self._alpha[chosen, kind], self._drafted[chosen, kind].astype(int)
        with np.errstate(divide="ignore"):
            run = np.log(self.rng.random(self.runs)) / np.log(np.clip(alpha, 0, 1 - 1e-12))
        accepted = np.where(alpha > 0, np.minimum(np.floor(run), drafted), 0).astype(int)
        self.lost = self.seconds[chosen] - self.tokens[chosen] / self.rates.max()
        return self._outcome(1 + accepted, self._seconds[chosen, kind], drafted, accepted)


def geometric(arms: Mapping[Arm, tuple[float, float]]) -> Mixture:
    """Arms with (acceptance of a token, seconds of a round), every block drafted in full: the truncated geometric law."""
    return Mixture({arm: [(1.0, alpha, arm.gamma, seconds)] for arm, (alpha, seconds) in arms.items()})


class TraceReplay(_Seeded):
    """A written text as a world: what each arm would have emitted from each position, given that the text is what it is.

    survival [K, N, G]: chance of at least 1 … G accepted tokens for a block of arm k at position t; drafted [K, N] tokens and seconds [K, N]
    of that round; match_length [N]; catch_up [K]: seconds for a token that an idle drafter missed; scoring: seconds of scoring all
    drafters once. Acceptance at position t uses one uniform of (game, t) whatever the arm and policy, so that comparisons are paired. A game
    that reached the end stands still: it gives 0 tokens in 0 seconds.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        survival: Array,
        drafted: Array,
        seconds: Array,
        match_length: Array,
        catch_up: Array | None = None,
        scoring: float = 0.0,
    ) -> None:
        self.arms = tuple(arms)
        gammas = np.array([arm.gamma for arm in arms])
        depth = np.arange(1, survival.shape[2] + 1)
        self.survival = np.where(depth[None, None] <= gammas[:, None, None], survival, 0.0)
        self.drafted = np.minimum(drafted, gammas[:, None])
        self.seconds = np.asarray(seconds)
        self.match_length = np.asarray(match_length)
        self.catch_up = np.zeros(len(arms)) if catch_up is None else np.asarray(catch_up)
        self.scoring = scoring
        reads = [sources(arm)[1] for arm in arms]
        self._same = np.array([[a == b for b in reads] for a in reads])  # [K, K] arms whose model is the same
        self._lookup = np.array([arm.drafter.startswith("lookup") for arm in arms])
        pure = [k for k, arm in enumerate(arms) if arm.drafter == "lookup"]
        # The arm that shows what lookup proposes.
        self._longest = max(pure, key=lambda k: arms[k].gamma) if pure else None
        self.length = survival.shape[1]

    def only(self, arms: Sequence[Arm]) -> TraceReplay:
        """The same text for a policy that has fewer arms."""
        at = [self.arms.index(arm) for arm in arms]
        parts = (self.survival[at], self.drafted[at], self.seconds[at], self.match_length, self.catch_up[at])
        return TraceReplay(arms, *parts, scoring=self.scoring)

    def reset(self, runs: int, seed: int) -> None:
        super().reset(runs, seed)
        self.position = np.zeros(runs, int)
        self.read = np.zeros((runs, len(self.arms)), int)  # how far the drafter of each arm has read
        self._uniforms = self.rng.random((runs, self.length))

    @property
    def done(self) -> Array:
        """Games that are through the text: [runs]."""
        return self.position >= self.length

    def context(self) -> Context:
        at = np.minimum(self.position, self.length - 1)
        return Context(self.match_length[at], np.maximum(self.position[:, None] - self.read - 1, 0))

    def play(self, chosen: Array) -> Outcome:
        rows, live = np.arange(self.runs), ~self.done
        at = np.minimum(self.position, self.length - 1)
        survival = self.survival[chosen, at]  # [runs, G]
        accepted = (self._uniforms[rows, at][:, None] < survival).sum(1)
        accepted = np.minimum(accepted, self.length - 1 - at)
        drafted = self.drafted[chosen, at]
        works = (drafted > 0) & ~(self._lookup[chosen] & (self.match_length[at] > 0))  # a model reads in this round
        unread = np.maximum(self.position - self.read[rows, chosen] - 1, 0)
        late = np.where((unread > 1) & works, unread * self.catch_up[chosen], 0.0)
        tokens = np.where(live, 1 + accepted, 0)
        self.read = np.where(self._same[chosen] & works[:, None], (self.position + accepted)[:, None], self.read)
        self.position = self.position + tokens
        hits, judged = self._proposed(at, tokens)
        seconds = np.where(live, self.seconds[chosen, at], 0.0)
        return Outcome(
            tokens, seconds, drafted, accepted, np.where(live, late, 0.0), hits, judged, self.match_length[at]
        )

    def _proposed(self, at: Array, tokens: Array) -> tuple[Array, Array]:
        """How the lookup's proposal fared on the tokens that a round emitted: hits and judged tokens, [runs] twice."""
        if self._longest is None:
            return np.zeros(self.runs, int), np.zeros(self.runs, int)
        whole = self.survival[self._longest, at].sum(1).astype(int)  # a lookup is certain: 0 or 1 at every depth
        hits = np.minimum(whole, tokens)
        return hits, np.minimum(hits + 1, np.minimum(self.drafted[self._longest, at], tokens))

    def evidence(self, start: int, stop: int) -> dict[str, Evidence]:
        """What a scoring of all drafters over positions start … stop − 1 would say."""
        found: dict[str, Evidence] = {}
        match = self.match_length[start:stop] > 0
        for k in np.argsort([arm.gamma for arm in self.arms], kind="stable"):  # the longest arm of a drafter stays
            arm = self.arms[k]
            if arm.gamma:
                by_lookup = match if arm.drafter.startswith("lookup") else np.zeros_like(match)
                found[arm.drafter] = Evidence(self.survival[k, start:stop], self.drafted[k, start:stop], by_lookup)
        return found


class MarkovLanguage:
    """A language of V letters: the target's next-letter law depends on the last letter alone, and so does each drafter's.

    Everything about it can be written down exactly: the ground truth for replay and full information.
    """

    def __init__(self, target: Array, drafters: Mapping[str, Array]) -> None:
        self.target = np.asarray(target)  # [V, V], rows sum to 1
        self.drafters = {name: np.asarray(table) for name, table in drafters.items()}

    @classmethod
    def random(cls, letters: int, drafters: Mapping[str, float], seed: int = 0) -> MarkovLanguage:
        """Dirichlet rows; a drafter is the target mixed with another such table by the given weight."""
        rng = np.random.default_rng(seed)
        target = rng.dirichlet(np.full(letters, 0.5), letters)
        tables = {
            name: (1 - weight) * target + weight * rng.dirichlet(np.full(letters, 0.5), letters)
            for name, weight in drafters.items()
        }
        return cls(target, tables)

    def write(self, length: int, runs: int, seed: int = 0, first: int = 0) -> Array:
        """Texts written by the target alone: [runs, length]."""
        rng = np.random.default_rng(seed)
        last, text = np.full(runs, first), np.empty((runs, length), int)
        for t in range(length):
            text[:, t] = last = _draw(self.target[last], rng)
        return text

    def expected_tokens(self, drafter: str, gamma: int) -> Array:
        """f_γ: expected tokens of a round behind each letter, f_γ(x) = 1 + Σ_v min(p, q)(v)·f_{γ−1}(v): [V]."""
        overlap = np.minimum(self.target, self.drafters[drafter])
        value = np.ones(len(self.target))
        for _ in range(gamma):
            value = 1 + overlap @ value
        return value

    def rounds(self, drafter: str, gamma: int, length: int, runs: int, seed: int = 0, first: int = 0) -> Array:
        """Really decode with the token rule until `length` letters stand: rounds needed by each of `runs` texts."""
        rng = np.random.default_rng(seed)
        q = self.drafters[drafter]
        last, position, count = np.full(runs, first), np.zeros(runs, int), np.zeros(runs, int)
        while (position < length).any():
            live = position < length
            count += live
            going = live.copy()  # games whose block is still being accepted
            for depth in range(gamma + 1):
                p_row = self.target[last]
                if depth == gamma:
                    letter = _draw(p_row, rng)
                    ends = np.ones(runs, bool)
                else:
                    drafted = _draw(q[last], rng)
                    ratio = p_row[np.arange(runs), drafted] / q[last, drafted]
                    passes = rng.random(runs) <= ratio
                    rest = np.maximum(p_row - q[last], 0) + 1e-300
                    letter = np.where(passes, drafted, _draw(rest / rest.sum(1, keepdims=True), rng))
                    ends = ~passes
                last = np.where(going, letter, last)
                position += going
                going &= ~ends
        return count

    def realised(self, drafter: str, text: Array, first: int = 0) -> tuple[Array, Array]:
        """a_i = min(1, q/p) at the written letters and Σ min(p, q) at their positions: [runs, N] twice."""
        before = np.concatenate([np.full((len(text), 1), first), text[:, :-1]], 1)
        p, q = self.target[before, text], self.drafters[drafter][before, text]
        overlap = np.minimum(self.target, self.drafters[drafter]).sum(1)
        return np.minimum(1, q / p), overlap[before]


def _draw(rows: Array, rng: np.random.Generator) -> Array:
    """One draw from each row of probabilities: [runs, V] -> [runs]."""
    return (rng.random((len(rows), 1)) > rows.cumsum(1)[:, :-1]).sum(1)
