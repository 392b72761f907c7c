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

import numpy as np
import torch
from torch import Tensor

from flashspec import rng
from flashspec.bandits import Context, Policy, outcome_of
from flashspec.drafters import Drafter, LookupDrafter
from flashspec.evidence import Scorer
from flashspec.records import (
    Arm,
    Candidate,
    Drafted,
    Estimate,
    NextKind,
    NextToken,
    Round,
    Seconds,
    StopReason,
    Verdict,
)
from flashspec.sampling import SamplingParams, adjust, has_usable_rows, warp
from flashspec.target import LanguageModel
from flashspec.text import Labels, TextStream
from flashspec.verifiers.base import UNUSABLE_ROW, Draft, Grounds, Settings, Verifier
from flashspec.verifiers.reference import ReferenceVerifier
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
    candidates: int = 6  # entries of p, q and residual recorded for each token; 0 for none, which costs least

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
    """What was drafted: the ids and the distributions they were drawn from.

    q [1, γ, V] float32: None where every token was certain (lookup, greedy), so that q is one-hot, and where only the device needs it.
    """

    ids: list[int]
    q: Tensor | None
    caught_up: int


class Outcome(NamedTuple):
    """What the host reads of a verdict, and its grounds where they are recorded."""

    tau: int
    token: int
    grounds: Grounds | None
    logits: Tensor  # [γ+1, V] as the target gave them


class SpeculativeDecoder:
    """One target with its drafters. A run's state is in the caches and in the generator, nowhere else."""

    def __init__(
        self,
        target: LanguageModel,
        drafters: Mapping[str, Drafter],
        tokenizer: Any,
        eos: Iterable[int],
        device: Any = "cpu",
        verifier: Verifier | None = None,
    ) -> None:
        self.target = target
        self.drafters = drafters
        self.tokenizer = tokenizer
        self.labels = Labels(tokenizer)
        self.eos = frozenset(eos)
        self.device = torch.device(device)
        self.verifier = verifier or ReferenceVerifier()

    def rounds(self, prompt: Sequence[int], request: Request, policy: Policy) -> Iterator[Round]:
        """Generate behind `prompt`, one Round at a time; the last one says why it stopped.

        Raises ValueError, with a sentence for the reader, where the prompt does not fit or logits are not finite.
        """
        budget = self._budget(prompt, request)
        if unknown := {arm.drafter for arm in policy.arms} - self.drafters.keys():
            raise ValueError(f"There is no drafter {min(unknown)!r} here; choose among {', '.join(self.drafters)}.")
        committed, text = list(prompt), TextStream(self.tokenizer, request.stop)
        seed = rng.seeds(request.seed, device=self.device)
        self._begin(committed, request, policy)
        scorer = Scorer(self.drafters, policy.arms, len(prompt), request) if policy.feedback == "full" else None
        late = 0.0  # seconds of learning from the last round, charged to the next
        for index in count():
            clock = self._clock(policy=late)
            position, generated = len(committed), len(committed) - len(prompt)
            chosen, match, proposal, estimates = self._choose(policy, committed, explained=request.candidates > 0)
            arm = policy.arms[int(chosen[0])]
            room = budget - generated
            gamma = min(arm.gamma, room - 1)
            clock.lap("policy")

            block, outcome = self._judge(arm, gamma, room, committed, len(prompt), request, seed, clock)
            emitted, pieces, stop = self._cut([*block.ids[: outcome.tau], outcome.token], text, room, request)
            committed += emitted
            self._settle(committed)
            tokens = self._describe(block, outcome, len(emitted), pieces, request.candidates)
            clock.lap("other")
            round = Round(
                index, position, arm, gamma, request.rule, self.verifier.name, *tokens,
                tau=min(outcome.tau, len(emitted)), caught_up=block.caught_up, seconds=clock.seconds(),
                stop="context" if stop == "length" and budget < request.max_new_tokens else stop, estimates=estimates,
            )  # fmt: skip
            clock.lap("learn")
            policy.update(chosen, outcome_of(round, proposal, match))
            if scorer:
                scorer.add(outcome.logits[: len(emitted)])
                if (evidence := scorer.due(committed)) is not None:
                    policy.observe(evidence)
            late = clock.lap("learn")
            yield round
            if round.stop:
                return

    # What a decoder of another kind does in its own way: `flashspec/graphs.py`.

    def wait_until_ready(self, request: Request, arms: Sequence[Arm]) -> None:
        """Return when such runs go as fast as they ever will: before costs are measured."""
        return

    def _begin(self, committed: list[int], request: Request, policy: Policy) -> None:
        """Read the prompt but for its last token, which the first round reads."""
        if committed[:-1]:
            self.target.read(committed[:-1])

    def _judge(
        self, arm: Arm, gamma: int, room: int, committed: list[int], prompt: int, request: Request, seed: Tensor, clock: Clock
    ) -> tuple[Block, Outcome]:  # fmt: skip
        """Draft up to `gamma` tokens and verify them. `room`: tokens that may still be emitted."""
        position = torch.full_like(seed, len(committed))
        block = self._draft(arm.drafter, committed, prompt, gamma, request, seed, position, clock)
        return block, self._verify(block, committed, prompt, request, seed, position, clock)

    def _settle(self, committed: list[int]) -> None:
        """Forget what was read and not committed."""
        self.target.cut(len(committed) - 1)

    def _unread(self, name: str, committed: list[int]) -> int:
        """Tokens that drafter `name` would have to read now."""
        return self.drafters[name].unread(committed)

    def _clock(self, **laps: float) -> Clock:
        return Clock(self.device, **laps)

    def _select(self, policy: Policy, context: Context) -> Any:
        """The policy's choice for the next round: [1]."""
        return policy.select(context)

    def _choose(
        self, policy: Policy, committed: list[int], explained: bool
    ) -> tuple[Any, int, list[int], dict[str, Estimate] | None]:
        """The policy's choice [1] in view of the lookup's match and of what idle drafters have missed; that match and what lookup
        proposes, on which every round tells something, whoever drafts; and what the policy compared."""
        if len(policy.arms) == 1:
            return self._select(policy, Context()), 0, [], None
        lookup, match, proposal = self.drafters.get("lookup"), 0, list[int]()
        if isinstance(lookup, LookupDrafter):
            lookup.catch_up(committed)
            match = lookup.match_length
            proposal = lookup.block(max(arm.gamma for arm in policy.arms))
        missed = {name: self._unread(name, committed) for name in {arm.drafter for arm in policy.arms}}
        unread = [max(missed[arm.drafter] - CONTINUOUS_USE, 0) for arm in policy.arms]
        chosen = self._select(policy, Context(np.array([match]), np.array([unread])))
        if not explained:
            return chosen, match, proposal, None
        (means, widths), indices = policy.components(), policy.indices()
        estimates = {
            str(arm): Estimate(
                *(float(v) if np.isfinite(v) else None for v in (indices[0, k], means[0, k], widths[0, k]))
            )
            for k, arm in enumerate(policy.arms)
        }
        return chosen, match, proposal, estimates

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
        clock: Clock,
    ) -> Block:
        """Let drafter `name` fill a block of up to `gamma` tokens; sample them and keep the q of each."""
        params, caught_up = request.sampling, 0
        ids: list[int] = []
        rows: list[Tensor | None] = []  # q of each token, None where it is one-hot
        if gamma > 0:
            drafter = self.drafters[name]
            caught_up = drafter.catch_up(committed)
            clock.lap("catch_up" if caught_up > CONTINUOUS_USE else "draft")
        while len(ids) < gamma:
            proposal = drafter.next(ids)
            if proposal is None:
                break
            if isinstance(proposal, int):
                token, row = proposal, None
            else:
                if not has_usable_rows(proposal[None, None]):
                    raise ValueError(
                        f"The drafter {name} gave logits that are not finite; load it in float32 or choose another."
                    )
                logits = adjust(proposal[None].float(), params, committed + ids, prompt, ())
                token, row = self._sample(logits, request, seed, position, offset=len(ids))
            ids.append(token)
            rows.append(row)
            if token in self.eos or (row is not None and ends_block(row[0, token], request.stop_below)):
                break  # decided after the token was drawn, and the token is kept: that leaves the law as it is
        q = None
        if any(row is not None for row in rows):
            vocabulary = self.target.vocabulary
            dense = [
                _one_hot(id, vocabulary, self.device) if row is None else row for id, row in zip(ids, rows, strict=True)
            ]
            q = torch.stack(dense, 1)
        clock.lap("draft")
        return Block(ids, q, caught_up)

    def _sample(
        self, logits: Tensor, request: Request, seed: Tensor, position: Tensor, offset: int
    ) -> tuple[int, Tensor | None]:
        """A token from the drafter's logits [1, V], and the distribution q [1, V] it was really drawn from (None: one-hot)."""
        if request.sampling.temperature == 0:
            return int(logits.argmax(-1)), None
        row = warp(logits, request.sampling)
        if request.rule == "coupled":  # the noise with which the target will choose at that position
            return int(rng.race(row, rng.exponentials(seed, position + offset, row.shape[-1], rng.RACE))), row
        return int(rng.choose(row, seed, position, rng.DRAFT, offset)), row

    def _verify(
        self,
        block: Block,
        committed: list[int],
        prompt: int,
        request: Request,
        seed: Tensor,
        position: Tensor,
        clock: Clock,
    ) -> Outcome:
        """One target forward and one judgement, of which the host reads the tokens, tau and status at once."""
        raw = self.target.read([*committed, *block.ids], keep=len(block.ids) + 1)  # [1, γ+1, V]
        logits = raw[0]
        if request.sampling.adjusts:
            raw = adjust(logits.float(), request.sampling, committed, prompt, block.ids)[None]
        clock.lap("target")
        draft = Draft(torch.tensor([block.ids], dtype=torch.int64, device=self.device), block.q)
        settings = Settings.of(request.sampling, 1, self.device)
        verdict = self.verifier.verify(raw, draft, settings, request.rule, seed, position)
        *tokens, tau, status = torch.cat((verdict.tokens[0], verdict.tau, verdict.status)).tolist()
        clock.lap("verify")
        if status & UNUSABLE_ROW:
            raise ValueError(
                f"{self.target.name} gave logits that are not finite; load it in float32 or check its weights."
            )
        grounds = verdict.grounds
        if grounds is None and request.candidates:
            grounds = ReferenceVerifier().explain(raw, draft, settings, request.rule, seed, position).grounds
        return Outcome(tau, tokens[tau], grounds, logits)

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
        self, block: Block, outcome: Outcome, emitted: int, pieces: list[str], width: int
    ) -> tuple[tuple[Drafted, ...], NextToken | None]:
        """Everything that the page shows about a round, as plain numbers."""
        tau, token, grounds, _ = outcome
        gamma, kept = len(block.ids), min(tau, emitted)
        drawn: list[dict[str, Any]] = [{} for _ in block.ids]
        next_p: float | None = None
        next_candidates: tuple[Candidate, ...] = ()
        if grounds is not None:
            p, q = grounds.p[0], grounds.q[0]
            columns = torch.tensor(block.ids, dtype=torch.int64, device=p.device)[:, None]
            p_x, q_x = p[:gamma].gather(1, columns)[:, 0].tolist(), q.gather(1, columns)[:, 0].tolist()
            uniforms, thresholds = grounds.uniforms[0].tolist(), grounds.thresholds[0].tolist()
            for i, id in enumerate(block.ids):
                drawn[i] = {"p": p_x[i], "q": q_x[i], "candidates": self._candidates(width, id, p[i], q[i])}
                if uniforms:
                    drawn[i] |= {"threshold": thresholds[i], "uniform": uniforms[i]}
            residual = grounds.weights[0] / grounds.weights[0].sum() if tau < gamma and uniforms else None
            next_p = float(p[tau, token])
            next_candidates = self._candidates(width, token, p[tau], q[tau] if tau < gamma else None, residual)
        drafted = []
        for i, id in enumerate(block.ids):
            fate: Verdict = "accepted" if i < kept else "rejected" if i == tau else "discarded"
            drafted.append(Drafted(id, self.labels(id), pieces[i] if i < kept else "", fate, **drawn[i]))
        if emitted <= tau:
            return tuple(drafted), None
        kind: NextKind = "replacement" if tau < gamma else "bonus"
        return tuple(drafted), NextToken(token, self.labels(token), pieces[tau], kind, next_p, next_candidates)

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


class Clock:
    """Splits the time of a round. On a GPU it waits for the device at each lap, so that work is charged where it was done."""

    def __init__(self, device: torch.device, **laps: float) -> None:
        self._device = device
        self._laps = laps
        self._last = self._now()

    def lap(self, name: str) -> float:
        now = self._now()
        passed, self._last = now - self._last, now
        self._laps[name] = self._laps.get(name, 0.0) + passed
        return passed

    def split(self, catch_up: float, draft: float, target: float, verify: float) -> None:
        """Divide the time since the last lap as the device's own clock says. What it does not account for is “other”."""
        now = self._now()
        passed, self._last = now - self._last, now
        device = {"catch_up": catch_up, "draft": draft, "target": target, "verify": verify}
        share = min(1.0, passed / max(sum(device.values()), 1e-12))  # less where the host did other work meanwhile
        for name, seconds in device.items():
            self._laps[name] = self._laps.get(name, 0.0) + seconds * share
        self._laps["other"] = self._laps.get("other", 0.0) + passed - share * sum(device.values())

    def seconds(self) -> Seconds:
        return Seconds(**self._laps)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
