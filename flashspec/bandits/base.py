"""What every policy is: arms, a choice before each round, something learned after it.

A policy plays `runs` games at once, one while decoding and hundreds in a simulation, so every array here has a first axis of
that length. K is the number of arms. numpy only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from flashspec.bandits.costs import CostTable
from flashspec.records import Arm, Round

Array = Any  # numpy.ndarray; the shape is in the docstring


class Context(NamedTuple):
    """What is known before the choice, for free."""

    # [runs] tokens of the n-gram that lookup found again, 0 for none
    match_length: Array = np.zeros(1, int)
    # [runs, K or 1] tokens that the drafter of each arm would have to catch up on
    unread: Array = np.zeros((1, 1), int)


class Outcome(NamedTuple):
    """What one round gave: arrays [runs]."""

    tokens: Array  # emitted: accepted + 1
    seconds: Array  # the whole round without catch-up
    drafted: Array
    accepted: Array
    catch_up: Array  # seconds that an idle drafter took to read what it had missed
    # leading tokens of the lookup's proposal that the round emitted, whoever drafted
    hits: Array = np.zeros(1, int)
    # tokens of that proposal that the round decided: the hits, and the first miss if it came to it
    judged: Array = np.zeros(1, int)
    # of the context in which the round began, which may be later than that of the choice
    match_length: Array = np.zeros(1, int)


class Evidence(NamedTuple):
    """What a drafter would have done at n consecutive positions of the text: full information.

    survival [n, G]: chance, given the text, that a block begun there has at least 1, 2, … G tokens accepted; its row sums are
    unbiased for accepted tokens whoever wrote the text. drafted [n]: how many tokens it would have proposed. match [n]: whether they came
    from a lookup.
    """

    survival: Array
    drafted: Array
    match: Array


class Policy(ABC):
    """Chooses one of `arms` for each run. Subclasses say what an arm is worth now (`score`) and how they learn (`learn`)."""

    feedback: Literal["bandit", "full"] = "bandit"
    waits: bool = True  # for a round's outcome before it chooses the next; else it may be asked one round ahead

    def __init__(self, arms: Sequence[Arm], *, runs: int = 1, seed: int = 0, dwell: int = 1) -> None:
        if not arms:
            raise ValueError("A policy needs at least one arm.")
        if runs < 1 or dwell < 1:
            raise ValueError(f"runs and dwell are {runs} and {dwell}; both must be at least 1.")
        self.arms = tuple(arms)
        self.runs, self.dwell, self.seed = runs, dwell, seed
        self.reset()

    def reset(self) -> None:
        """Forget everything. The random stream starts again too, so that equal seeds give equal games."""
        self.rng = np.random.default_rng(self.seed)
        self.pulls = np.zeros((self.runs, len(self.arms)), int)
        self._index = np.zeros((self.runs, len(self.arms)))
        self._held = np.zeros(self.runs, int)
        self._stay = np.zeros(self.runs, int)  # rounds for which the arm must still be kept

    @property
    def rounds(self) -> Array:
        """Rounds learned from: [runs]."""
        return self.pulls.sum(1)

    def select(self, context: Context = Context()) -> Array:  # noqa: B008 (immutable)
        """Index of the arm for the next round of each run: [runs]. With dwell > 1 an arm is kept for that many rounds."""
        self._index = self.score(context)
        choice = self._index.argmax(1)
        if self.dwell > 1:
            choice = np.where(self._stay > 0, self._held, choice)
            self._stay = np.where(self._stay > 0, self._stay, self.dwell) - 1
            self._held = choice
        return choice

    def update(self, chosen: Array, outcome: Outcome) -> None:
        """Learn what `chosen` [runs] gave."""
        self.pulls[np.arange(self.runs), chosen] += 1
        self.learn(chosen, outcome)

    def observe(self, evidence: Mapping[str, Evidence]) -> None:
        """Learn what every drafter would have done on the text just written; only asked of full-information policies."""
        return

    def indices(self) -> Array:
        """What the last choice maximised: [runs, K]."""
        return self._index

    def components(self) -> tuple[Array, Array]:
        """The index as a sum, for the chart: what is estimated and the bonus for what is not known, each [runs, K]."""
        return self._index, np.zeros_like(self._index)

    @abstractmethod
    def score(self, context: Context) -> Array:
        """What the choice maximises: [runs, K]."""

    @abstractmethod
    def learn(self, chosen: Array, outcome: Outcome) -> None:
        """Update the statistics with one outcome a run."""


def outcome_of(round: Round, proposal: Sequence[int] = (), match_length: int = 0) -> Outcome:
    """A Round as the outcome of one game. proposal: what lookup would have drafted, behind a match of that length."""
    seconds, emitted = round.seconds, round.emitted
    agree = [a == b for a, b in zip(proposal, emitted, strict=False)]
    hits = agree.index(False) if False in agree else len(agree)
    values = (len(emitted), seconds.total - seconds.catch_up, len(round.drafted), round.tau, seconds.catch_up)
    return Outcome(*(np.array([value]) for value in (*values, hits, min(hits + 1, len(agree)), match_length)))


def gumbel(chances: Array, rng: np.random.Generator) -> Array:
    """Scores whose argmax is a draw from `chances`: log-chance plus Gumbel noise, any shape."""
    return np.log(np.maximum(chances, 1e-300)) + rng.gumbel(size=chances.shape)


class Rated(Policy):
    """A policy that knows what its arms cost, and goes on measuring it while it decodes."""

    def __init__(self, arms: Sequence[Arm], costs: CostTable, *, runs: int = 1, seed: int = 0, dwell: int = 1) -> None:
        self.costs = costs
        super().__init__(arms, runs=runs, seed=seed, dwell=dwell)

    def measure(self, chosen: Array, outcome: Outcome, match: bool | None = None) -> None:
        """While decoding, the round refreshes the table; a catch-up would blur what the drafter's first token costs."""
        if self.runs == 1 and not outcome.catch_up[0]:
            self.costs.refresh(int(chosen[0]), match, int(outcome.drafted[0]), float(outcome.seconds[0]))

    @property
    def gammas(self) -> Array:
        return self.costs.gammas
