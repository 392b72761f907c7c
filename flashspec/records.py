"""What happened, as immutable data: Arm, Drafted, NextToken, Round, Trace, and their JSON form.

The page, the charts, replay and the benchmarks read nothing but these records, so a saved Trace shows everything again
without a model. Knows nothing about torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec

SCHEMA = 1
MAX_TRACE_BYTES = 64 * 2**20

Verdict = Literal["accepted", "rejected", "discarded"]  # discarded: drafted behind the rejected token
NextKind = Literal["replacement", "bonus"]
StopReason = Literal["eos", "stop string", "length", "context"]


class Arm(NamedTuple):
    """What a policy chooses: who drafts, and how many tokens."""

    drafter: str
    gamma: int

    def __str__(self) -> str:
        return self.drafter if self.gamma == 0 else f"{self.drafter} γ={self.gamma}"


@dataclass(frozen=True)
class Estimate:
    """What a policy thought of an arm before it chose: the index it compared, and the estimate and width behind it.

    None where it is infinite: an arm that was never tried.
    """

    index: float | None
    mean: float | None
    width: float | None


class Candidate(NamedTuple):
    """One vocabulary entry at one position. q and residual are None where there is no such distribution."""

    id: int
    text: str
    p: float
    q: float | None = None
    residual: float | None = None


@dataclass(frozen=True)
class Drafted:
    """A drafted token and its fate. The numbers are None where the request recorded none (`candidates` = 0 on a GPU)."""

    id: int
    text: str  # how to show the token itself
    piece: str  # the output text that it released, empty unless emitted
    verdict: Verdict
    p: float | None = None
    q: float | None = None
    threshold: float | None = None  # the position passes when uniform <= threshold; None for the coupled rule
    uniform: float | None = None
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True)
class NextToken:
    """The token that ends a round: drawn from the residual (replacement) or from p (bonus)."""

    id: int
    text: str
    piece: str
    kind: NextKind
    p: float | None = None
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True)
class Seconds:
    """Where the time of a round went. catch_up: a drafter reading more than an arm in continuous use ever misses."""

    draft: float = 0.0
    target: float = 0.0
    verify: float = 0.0
    catch_up: float = 0.0
    other: float = 0.0
    policy: float = 0.0  # choosing, learning and scoring idle drafters; what follows a round is charged to the next

    @property
    def total(self) -> float:
        return self.draft + self.target + self.verify + self.catch_up + self.other + self.policy


@dataclass(frozen=True)
class Round:
    """Draft, verify, commit: one pass of the target."""

    index: int
    position: int  # absolute index of the first drafted token
    arm: Arm  # what the policy chose
    gamma: int  # what was asked of the drafter: less than the arm's near the end
    rule: str
    backend: str
    drafted: tuple[Drafted, ...]
    next: NextToken | None  # None where the text ended inside the accepted tokens
    tau: int  # accepted tokens that were emitted
    caught_up: int  # tokens the drafter had to read before drafting
    seconds: Seconds
    stop: StopReason | None = None
    estimates: Mapping[str, Estimate] | None = None  # what the policy compared, by arm; None where there was no choice

    @property
    def emitted(self) -> tuple[int, ...]:
        """Ids of the emitted tokens in order."""
        accepted = tuple(token.id for token in self.drafted[: self.tau])
        return (*accepted, self.next.id) if self.next else accepted

    @property
    def text(self) -> str:
        """Output text that this round released."""
        return "".join(token.piece for token in self.drafted[: self.tau]) + (self.next.piece if self.next else "")


@dataclass(frozen=True)
class Totals:
    """Figures of a run, all counted on ids."""

    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0

    def plus(self, round: Round) -> Totals:
        """The totals after one more round."""
        return Totals(
            self.tokens + len(round.emitted),
            self.rounds + 1,
            self.drafted + len(round.drafted),
            self.accepted + round.tau,
            self.seconds + round.seconds.total,
        )

    @property
    def rate(self) -> float | None:
        """Tokens per second: ratio of sums, without the reading of the prompt."""
        return self.tokens / self.seconds if self.seconds > 0 else None

    @property
    def tokens_per_round(self) -> float | None:
        return self.tokens / self.rounds if self.rounds else None

    @property
    def acceptance(self) -> float | None:
        """Share of drafted tokens that were accepted; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None


def totals(rounds: Iterable[Round]) -> Totals:
    """Sum of `rounds`."""
    result = Totals()
    for round in rounds:
        result = result.plus(round)
    return result


@dataclass(frozen=True)
class Trace:
    """A whole run. `settings` is the request as plain values; `machine` names hardware and versions."""

    family: str
    prompt: str
    prompt_tokens: int
    settings: Mapping[str, Any]
    machine: Mapping[str, str]
    rounds: tuple[Round, ...]
    schema: int = SCHEMA

    @property
    def text(self) -> str:
        return "".join(round.text for round in self.rounds)

    def to_json(self) -> bytes:
        """Exact: floats are written with all their digits."""
        return msgspec.json.encode(self)


def trace_from_json(data: bytes | str) -> Trace:
    """Read a saved Trace.

    Raises ValueError, with a sentence for the reader, where it is too large, not a Trace, or of an unknown version.
    """
    if len(data) > MAX_TRACE_BYTES:
        raise ValueError(f"This trace is larger than {MAX_TRACE_BYTES // 2**20} MB; save a shorter run.")
    try:
        version = msgspec.json.decode(data, type=_Version).schema
        if version != SCHEMA:
            raise ValueError(
                f"This trace has schema version {version}; this FlashSpec reads version {SCHEMA}. "
                "Record it again or update FlashSpec."
            )
        return msgspec.json.decode(data, type=Trace)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"This file is not a FlashSpec trace ({error}). Choose a trace.json saved by FlashSpec."
        ) from None


class _Version(msgspec.Struct):
    schema: int
