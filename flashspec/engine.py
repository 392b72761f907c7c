"""The loop: a policy picks an arm, a drafter proposes, the target scores, the verifier judges, the round is committed.

A plain generator of immutable Rounds; closing it at any point leaves the decoder ready for the next run. Knows nothing about
pages, terminals or where models come from.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashspec import rng
from flashspec.bandits import Policy
from flashspec.drafters.base import Drafter
from flashspec.records import Candidate, Drafted, NextKind, NextToken, Round, Seconds, StopReason, Verdict
from flashspec.sampling import SamplingParams, adjust, has_usable_rows, warp
from flashspec.target import LanguageModel
from flashspec.text import Labels, TextStream
from flashspec.verifiers import reference
from flashspec.verifiers.rules import RULES

CONTINUOUS_USE = 2  # tokens that a drafter in continuous use has to read: the last drafted one and the bonus


@dataclass(frozen=True)
class Request:
    """What is to be generated. Raises ValueError with a sentence for settings that cannot work."""

    max_new_tokens: int = 128
    sampling: SamplingParams = field(default_factory=SamplingParams)
    rule: str = "token"
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_below: float = 0.0  # end a block after a drafted token whose q is below this
    candidates: int = 6  # entries of p, q and residual recorded for each token; 0 for none

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; ask for at least 1 token.")
        if self.rule not in RULES:
            raise ValueError(f"There is no rule {self.rule!r}; choose one of {', '.join(RULES)}.")
        if not 0 <= self.stop_below <= 1:
            raise ValueError(f"stop_below is {self.stop_below}; choose a probability, 0 to draft the whole block.")
        if any(not stop for stop in self.stop):
            raise ValueError("A stop string is empty; remove it or write the text to stop at.")


class Block(NamedTuple):
    """What was drafted: the ids and, for each, the distribution it was drawn from (one-hot where it was certain)."""

    ids: list[int]
    q: Tensor  # [1, γ, V] float32
    caught_up: int


class SpeculativeDecoder:
    """One target with its drafters. A run's state is in the caches and in the generator, nowhere else."""

    def __init__(
        self,
        target: LanguageModel,
        drafters: Mapping[str, Drafter],
        tokenizer: Any,
        eos: Iterable[int],
        device: Any = "cpu",
    ):
        self.target = target
        self.drafters = drafters
        self.tokenizer = tokenizer
        self.labels = Labels(tokenizer)
        self.eos = frozenset(eos)
        self.device = torch.device(device)

    def rounds(self, prompt: Sequence[int], request: Request, policy: Policy) -> Iterator[Round]:
        """Generate behind `prompt`, one Round at a time; the last one says why it stopped.

        Raises ValueError, with a sentence for the reader, where the prompt does not fit or logits are not finite.
        """
        budget = self._budget(prompt, request)
        committed, text = list(prompt), TextStream(self.tokenizer, request.stop)
        seed = rng.seeds(request.seed, device=self.device)
        if committed[:-1]:
            self.target.read(committed[:-1])
        for index in count():
            arm, indices = policy.select(), policy.indices()
            generated = len(committed) - len(prompt)
            gamma = min(arm.gamma, budget - generated - 1)
            position = torch.full_like(seed, len(committed))
            clock = _Clock(self.device)

            block = self._draft(arm.drafter, committed, len(prompt), gamma, request, seed, position, clock)
            verdict, tau, token = self._verify(block, committed, len(prompt), request, seed, position, clock)
            emitted, pieces, stop = self._cut([*block.ids[:tau], token], text, budget - generated, request)
            committed += emitted
            self.target.cut(len(committed) - 1)
            tokens = self._describe(block, verdict, tau, token, len(emitted), pieces, request.candidates)
            clock.lap("other")
            round = Round(
                index, int(position), arm, gamma, request.rule, reference.BACKEND, *tokens,
                tau=min(tau, len(emitted)), caught_up=block.caught_up, seconds=clock.seconds(),
                stop="context" if stop == "length" and budget < request.max_new_tokens else stop, indices=indices,
            )  # fmt: skip
            policy.update(round)
            yield round
            if round.stop:
                return

    def _budget(self, prompt: Sequence[int], request: Request) -> int:
        """Tokens that may be generated."""
        if not prompt:
            raise ValueError("The prompt is empty; write something to continue.")
        room = self.target.context_length - len(prompt)
        if room < 1:
            raise ValueError(
                f"The prompt has {len(prompt)} tokens, but {self.target.name} reads at most {self.target.context_length}, "
                "the output included; shorten the prompt."
            )
        return min(request.max_new_tokens, room)

    def _draft(
        self,
        name: str,
        committed: list[int],
        prompt: int,
        gamma: int,
        request: Request,
        seed: Tensor,
        position: Tensor,
        clock: _Clock,
    ) -> Block:
        """Let drafter `name` fill a block of up to `gamma` tokens; sample them and keep the q of each."""
        params, caught_up = request.sampling, 0
        ids: list[int] = []
        rows: list[Tensor] = []
        if gamma > 0:
            drafter = self.drafters[name]
            caught_up = drafter.catch_up(committed)
            clock.lap("catch_up" if caught_up > CONTINUOUS_USE else "draft")
        while len(ids) < gamma:
            proposal = drafter.next(ids)
            if proposal is None:
                break
            if isinstance(proposal, int):
                token, row = proposal, _one_hot(proposal, self.target.vocabulary, self.device)
            else:
                if not has_usable_rows(proposal[None, None]):
                    raise ValueError(
                        f"The drafter {name} gave logits that are not finite; load it in float32 or choose another."
                    )
                row = warp(adjust(proposal[None].float(), params, committed + ids, prompt, ()), params)  # [1, V]
                if request.rule == "coupled":
                    noise = rng.exponentials(seed, position + len(ids), row.shape[-1], rng.RACE)
                else:
                    noise = rng.exponentials(seed, position, row.shape[-1], rng.DRAFT, offset=len(ids))
                token = int(rng.race(row, noise))
            ids.append(token)
            rows.append(row)
            if token in self.eos or ends_block(row[0, token], request.stop_below):
                break  # decided after the token was drawn, and the token is kept: that leaves the law as it is
        q = torch.stack(rows, 1) if rows else torch.empty(1, 0, self.target.vocabulary, device=self.device)
        clock.lap("draft")
        return Block(ids, q, caught_up)

    def _verify(
        self,
        block: Block,
        committed: list[int],
        prompt: int,
        request: Request,
        seed: Tensor,
        position: Tensor,
        clock: _Clock,
    ) -> tuple[reference.Verdict, int, int]:
        """One target forward and one judgement: (verdict, tau, next token), read by the host once."""
        raw = self.target.read([*committed, *block.ids], keep=len(block.ids) + 1).float()  # [1, γ+1, V]
        clock.lap("target")
        logits = adjust(raw[0], request.sampling, committed, prompt, block.ids)[None]
        ids = torch.tensor([block.ids], dtype=torch.int64, device=self.device)
        verdict = reference.verify(logits, ids, block.q, request.sampling, request.rule, seed, position)
        outcome = torch.cat((verdict.tau, verdict.next_token, verdict.usable.long()))
        tau, token, usable = (int(number) for number in outcome.tolist())
        clock.lap("verify")
        if not usable:
            raise ValueError(
                f"{self.target.name} gave logits that are not finite; load it in float32 or check its weights."
            )
        return verdict, tau, token

    def _cut(
        self, tokens: list[int], text: TextStream, room: int, request: Request
    ) -> tuple[list[int], list[str], StopReason | None]:
        """The tokens that are really emitted, the text each of them releases, and why the text ends here, if it does."""
        emitted: list[int] = []
        pieces: list[str] = []
        stop: StopReason | None = None
        for token in tokens[:room]:
            emitted.append(token)
            if token in self.eos:
                pieces.append("")
                stop = "eos"
                break
            pieces.append(text.push(token))
            if text.stopped:
                stop = "stop string"
                break
        if stop is None and len(emitted) == room:
            stop = "length"
        if stop:
            pieces[-1] += text.finish()
        return emitted, pieces, stop

    def _describe(
        self,
        block: Block,
        verdict: reference.Verdict,
        tau: int,
        token: int,
        emitted: int,
        pieces: list[str],
        width: int,
    ) -> tuple[tuple[Drafted, ...], NextToken | None]:
        """Everything that the page shows about a round, as plain numbers."""
        p, q = verdict.p[0], block.q[0]
        gamma = len(block.ids)
        columns = torch.tensor(block.ids, dtype=torch.int64, device=p.device)[:, None]
        p_x, q_x = p[:gamma].gather(1, columns)[:, 0].tolist(), q.gather(1, columns)[:, 0].tolist()
        uniforms, thresholds = verdict.uniforms[0].tolist(), verdict.thresholds[0].tolist()
        drafted = []
        for i, drawn in enumerate(block.ids):
            fate: Verdict = "accepted" if i < min(tau, emitted) else "rejected" if i == tau else "discarded"
            drafted.append(
                Drafted(
                    drawn,
                    self.labels(drawn),
                    pieces[i] if i < min(tau, emitted) else "",
                    p_x[i],
                    q_x[i],
                    thresholds[i] if uniforms else None,
                    uniforms[i] if uniforms else None,
                    fate,
                    self._candidates(width, drawn, p[i], q[i]),
                )
            )
        if emitted <= tau:
            return tuple(drafted), None
        residual = verdict.weights[0] / verdict.weights[0].sum() if tau < gamma and uniforms else None
        candidates = self._candidates(width, token, p[tau], q[tau] if tau < gamma else None, residual)
        kind: NextKind = "replacement" if tau < gamma else "bonus"
        return tuple(drafted), NextToken(token, self.labels(token), pieces[tau], float(p[tau, token]), kind, candidates)

    def _candidates(
        self, width: int, token: int, p: Tensor, q: Tensor | None, residual: Tensor | None = None
    ) -> tuple[Candidate, ...]:
        """The `width` likeliest entries of p and q together, none impossible, the token itself always among them."""
        if width == 0:
            return ()
        top = (p if q is None else torch.maximum(p, q)).topk(min(width, len(p)))
        likeliest = [id for id, value in zip(top.indices.tolist(), top.values.tolist(), strict=True) if value > 0]
        if token not in likeliest:
            likeliest = [*likeliest[: width - 1], token]
        columns = [row[likeliest].tolist() if row is not None else [None] * len(likeliest) for row in (p, q, residual)]
        return tuple(Candidate(id, self.labels(id), *values) for id, *values in zip(likeliest, *columns, strict=True))


def ends_block(q_x: Any, stop_below: Any) -> bool:
    """Early stop: whether the block ends after a token that was drawn with probability q_x. The token stays in the block."""
    return bool(q_x < stop_below)


def _one_hot(token: int, vocabulary: int, device: torch.device) -> Tensor:
    row = torch.zeros(1, vocabulary, device=device)
    row[0, token] = 1.0
    return row


class _Clock:
    """Splits the time of a round. On a GPU it waits for the device at each lap, so that work is charged where it was done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: dict[str, float] = {}
        self._last = self._now()

    def lap(self, name: str) -> None:
        now = self._now()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    def seconds(self) -> Seconds:
        return Seconds(**self._laps)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
