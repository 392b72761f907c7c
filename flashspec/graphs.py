"""The engine on a GPU: a round is three CUDA graphs (draft, target, verify) on texts and caches that stay on the device.

Positions, accepted counts, seeds and caches live in device memory, so a graph serves every length of text. The host reads a finished
round once, and where the next one needs nothing of it that one is under way before it looks: a model drafts again, or none, there is
nothing to explain, and the policy may be asked one round ahead. Graphs are captured when a shape is first met; until the kernels are
compiled, rounds run through PyTorch, so the first token never waits for a compiler. What the graphs do not serve (penalties, biases,
early stop) runs through PyTorch as well.

Without a GPU the same code calls the kernels in Triton's interpreter, for tests.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashspec import rng
from flashspec.bandits import Context, Fixed, Policy
from flashspec.drafters import Drafter, LookupDrafter, LookupElseDrafter, ModelDrafter, PlainDrafter
from flashspec.engine import CONTINUOUS_USE, Block, Clock, Outcome, Request, SpeculativeDecoder
from flashspec.models.fused import PREFILL, Draw, FusedLlama, FusedModel, Text, commit
from flashspec.records import Arm, Round
from flashspec.target import LanguageModel, common
from flashspec.text import TextStream
from flashspec.verifiers.base import UNUSABLE_ROW, Draft, Settings, Verifier
from flashspec.verifiers.reference import ReferenceVerifier
from flashspec.verifiers.triton import TritonVerifier

CAPACITY = 2048  # tokens of a cache at first; a longer text gets a larger one
CATCH_UP = 16  # rows that are read at once of a short gap


@dataclass(frozen=True)
class Flight:
    """A round under way: where its result will be on the host, and marks of the device's time around its four parts."""

    missed: int  # tokens that the drafter had to catch up with
    result: Tensor  # [B, 2γ+3] int64: drafted ids, tokens, tau, status
    marks: Sequence[Any]


class Board:
    """B requests on one device: texts, caches, graphs. Belongs to one run at a time."""

    def __init__(
        self,
        fused: Mapping[str, FusedLlama],
        verifier: Verifier,
        batch: int,
        capacity: int,
        device: torch.device,
        captures: bool = True,
    ) -> None:
        self.target, self.capacity, self.device, self.verifier = next(iter(fused)), capacity, device, verifier
        self.text = Text.empty(batch, capacity, device)
        self.models = {
            name: FusedModel(weights, self.text, only_drafts=name != self.target) for name, weights in fused.items()
        }
        self.seed = torch.zeros(batch, dtype=torch.int64, device=device)
        self.active = torch.ones(batch, dtype=torch.int32, device=device)
        self.known: list[list[int]] = [[] for _ in range(batch)]  # the committed texts
        self.held = {name: [0] * batch for name in fused}  # leading positions of them at which a model's cache is right
        self.rule = "token"
        self.settings = self._asked = Settings.of(Request().sampling, batch, device)
        self._captures = captures and device.type == "cuda"
        self._vocabulary = fused[self.target].vocabulary
        self._nothing = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        self._draw = Draw(batch, self._vocabulary, device)
        self._kept: dict[tuple, Any] = {}  # tensors by name and γ
        self._settings: dict[tuple, Settings] = {}
        self._graphs: dict[tuple, Callable[[], None]] = {}
        self._turn = 0

    def prepare(self, texts: Sequence[list[int]], requests: Sequence[Request]) -> None:
        """Begin new texts: what the caches hold of them already is not read again."""
        for row, (known, new) in enumerate(zip(self.known, texts, strict=True)):
            kept = common(known, new)
            for held in self.held.values():
                held[row] = min(held[row], kept)
            self.text.ids[row, : len(new)].copy_(torch.tensor(new))
        self.known = [list(ids) for ids in texts]
        self.text.length.copy_(torch.tensor([len(ids) for ids in texts]))
        self.seed.copy_(torch.cat([rng.seeds(request.seed) for request in requests]))
        self.active.fill_(1)
        fresh = Settings.of([request.sampling for request in requests], len(requests), self.device)
        # Graphs read the tensors of the first settings with these cuts; the PyTorch verifier looks at the requests themselves.
        self.settings, self._asked = self._settings.setdefault(fresh.cuts, fresh), fresh
        for column in ("temperature", "top_k", "top_p", "min_p"):
            getattr(self.settings, column).copy_(getattr(fresh, column))
        self.rule = requests[0].rule
        self.read(self.target, 1)

    def read(self, name: str, but: int) -> int:
        """Bring a model's caches to all of the texts but their last `but` tokens; returns how many were missing at most."""
        held = self.held[name]
        missing = max(len(known) - but - have for known, have in zip(self.known, held, strict=True))
        if missing > 0:
            rows = CATCH_UP if missing <= CATCH_UP else PREFILL
            self.text.reading.copy_(torch.tensor(held))
            for _ in range(-(-missing // rows)):
                self._run(("read", name, rows), lambda: self._read(name, rows))
            self.held[name] = [max(len(known) - but, 0) for known in self.known]
        return max(missing, 0)

    def launch(
        self, name: str | None, ids: Sequence[int], gamma: int, lengths: Sequence[int] | None = None, catch_up: bool = True
    ) -> Flight:  # fmt: skip
        """Start a round and wait for nothing: drafter model `name`, or the given `ids` for one request, or neither (γ = 0).

        lengths [B]: how many of the γ tokens count in each request, all of them where None; shorter blocks then need no graphs of their
        own.
        """
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        marks, missed = [_mark(stream)], 0
        if name is not None and catch_up:
            missed = self.read(name, CONTINUOUS_USE)
        marks.append(_mark(stream))
        if name is not None:
            drafting = ("draft", name, gamma, self.rule == "coupled", self.settings.cuts)
            self._run(drafting, lambda: self._draft(name, gamma))
        elif gamma:
            self._drafted(gamma).copy_(torch.tensor([[*ids, *[0] * (gamma - len(ids))]]), non_blocking=True)
        if lengths is not None:
            self._lengths(gamma).copy_(torch.tensor(lengths), non_blocking=True)
        marks.append(_mark(stream))
        self._run(("target", gamma), lambda: self._read_block(gamma))
        marks.append(_mark(stream))
        soft, ragged = name is not None, lengths is not None
        if isinstance(self.verifier, TritonVerifier):
            key = ("verify", gamma, soft, ragged, self.rule, self.settings.cuts)
            self._run(key, lambda: self._verify(gamma, soft, ragged, self.settings))
        else:
            self._verify(gamma, soft, ragged, self._asked)
        self._turn += 1
        result = self._host_results(gamma)[self._turn % 2]
        result.copy_(self._result(gamma), non_blocking=True)
        marks.append(_mark(stream))
        return Flight(missed, result, marks)

    def land(self, flight: Flight) -> tuple[list[list[int]], tuple[float, float, float, float]]:
        """Wait for a round: its result, and the device's seconds for catching up, draft, target and verification."""
        pairs = list(pairwise(flight.marks))
        if self.device.type == "cuda":
            flight.marks[-1].synchronize()
            before, draft, target, verify = (start.elapsed_time(end) / 1000 for start, end in pairs)
        else:
            before, draft, target, verify = (end - start for start, end in pairs)
        catch_up = before if flight.missed else 0.0
        return flight.result.tolist(), (catch_up, draft, target, verify)

    def grow(self, name: str | None, gamma: int, tau: Sequence[int], emitted: Sequence[list[int]]) -> None:
        """A round was committed, in which model `name` drafted γ tokens: note what the caches hold now."""
        for row, (known, t, some) in enumerate(zip(self.known, tau, emitted, strict=True)):
            if name is not None:
                self.held[name][row] = len(known) + min(t, gamma - 1)
            known += some
            self.held[self.target][row] = len(known) - 1

    def logits(self, gamma: int) -> Tensor:
        """The target's, as the last round left them: [B, γ+1, V]."""
        return self._keep("logits", gamma, lambda: torch.empty(self._shape(gamma + 1), device=self.device))

    def draft(self, gamma: int, soft: bool) -> Draft:
        """What the last round drafted."""
        return Draft(self._drafted(gamma), logits=self._draft_logits(gamma) if soft else None)

    def _read(self, name: str, rows: int) -> None:
        self.models[name].forward(rows, 0, self._nothing, start=self.text.reading)
        self.text.reading.add_(rows)

    def _draft(self, name: str, gamma: int) -> None:
        """γ tokens from one model. The first step reads two: the last accepted one may be new to it, and the last emitted one is."""
        model, drafted, logits = self.models[name], self._drafted(gamma), self._draft_logits(gamma)
        for i in range(gamma):
            rows, shift = (CONTINUOUS_USE, -CONTINUOUS_USE) if i == 0 else (1, i - 1)
            model.forward(rows, shift, drafted, out=logits[:, i : i + 1])
            # Coupled: the noise with which the target will choose at that position.
            purpose, offset = (rng.RACE, i) if self.rule == "coupled" else (rng.DRAFT + 256 * i, 0)
            self._draw(logits[:, i], self.settings, self.seed, self.text.length, drafted, i, offset, purpose)

    def _read_block(self, gamma: int) -> None:
        self.models[self.target].forward(gamma + 1, -1, self._drafted(gamma), out=self.logits(gamma))

    def _verify(self, gamma: int, soft: bool, ragged: bool, settings: Settings) -> None:
        draft = replace(self.draft(gamma, soft), num_draft=self._lengths(gamma) if ragged else None)
        verdict = self.verifier.verify(self.logits(gamma), draft, settings, self.rule, self.seed, self.text.length)
        commit(draft.ids, verdict, self.active, self.text, self._result(gamma))

    def _shape(self, rows: int) -> tuple[int, int, int]:
        return len(self.seed), rows, self._vocabulary

    def _drafted(self, gamma: int) -> Tensor:
        return self._keep("drafted", gamma, lambda: self._nothing.new_zeros(len(self.seed), gamma))

    def _draft_logits(self, gamma: int) -> Tensor:
        return self._keep("draft logits", gamma, lambda: torch.empty(self._shape(gamma), device=self.device))

    def _lengths(self, gamma: int) -> Tensor:
        return self._keep("lengths", gamma, lambda: torch.full_like(self.active, gamma))

    def _result(self, gamma: int) -> Tensor:
        return self._keep("result", gamma, lambda: self._nothing.new_zeros(len(self.seed), 2 * gamma + 3))

    def _host_results(self, gamma: int) -> list[Tensor]:
        """Two places that take turns: one may be read while the next round fills the other."""
        pin, like = self.device.type == "cuda", self._result(gamma)
        make = lambda: [torch.zeros(like.shape, dtype=like.dtype, pin_memory=pin) for _ in range(2)]  # noqa: E731
        return self._keep("host results", gamma, make)

    def _keep(self, what: str, gamma: int, make: Callable[[], Any]) -> Any:
        key = (what, gamma)
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def _run(self, key: tuple, work: Callable[[], None]) -> None:
        """Do `work`, as a CUDA graph that is captured the first time."""
        if not self._captures:
            work()
            return
        if key not in self._graphs:
            self._graphs[key] = self._capture(work)
        self._graphs[key]()

    def _capture(self, work: Callable[[], None]) -> Callable[[], None]:
        before = [tensor.clone() for tensor in (self.text.length, self.text.reading)]
        work()  # compiles and makes workspaces, which a capture must not
        for tensor, value in zip((self.text.length, self.text.reading), before, strict=True):
            tensor.copy_(value)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        return graph.replay


def _mark(stream: Any) -> Any:
    """A point in the device's time, or in the host's where there is no stream."""
    if stream is None:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


class Pool:
    """What the decoders of a family share: weights, boards that no run uses, and which kernels are compiled."""

    def __init__(self, fused: Mapping[str, FusedLlama], device: torch.device) -> None:
        self.fused, self.device = fused, device
        self.problem: str | None = None  # why the kernels cannot be compiled here
        self._spare: list[Board] = []
        self._compiled: dict[tuple, threading.Event] = {}

    def take(self, verifier: Verifier, batch: int, tokens: int) -> Board:
        """A board for `batch` texts of up to `tokens` tokens, with empty or earlier caches."""
        capacity = -(-max(tokens + PREFILL, CAPACITY) // 256) * 256
        for board in self._spare:
            fits = len(board.seed) == batch and board.capacity >= capacity
            if fits and type(board.verifier) is type(verifier):
                self._spare.remove(board)
                return board
        self._spare = [board for board in self._spare if len(board.seed) != batch]  # too small: make room
        return Board(self.fused, verifier, batch, capacity, self.device)

    def give_back(self, board: Board) -> None:
        self._spare.append(board)

    def is_ready(self, request: Request, arms: Sequence[Arm], drafters: Mapping[str, Drafter]) -> bool:
        """Whether the kernels for such a run are compiled. Where not, they are now being compiled beside the run."""
        if self.device.type != "cuda":
            return True
        cuts = Settings.of(request.sampling, 1, "cpu").cuts
        keys = {arm: (request.rule, cuts, arm) for arm in arms}
        missing = [arm for arm, key in keys.items() if key not in self._compiled]
        if missing:
            done = threading.Event()
            self._compiled |= {keys[arm]: done for arm in missing}
            threading.Thread(target=self._compile, args=(done, request, missing, drafters), daemon=True).start()
        return all(self._compiled[key].is_set() for key in keys.values())

    def _compile(
        self, done: threading.Event, request: Request, arms: Sequence[Arm], drafters: Mapping[str, Drafter]
    ) -> None:
        """Call every kernel of such a run once, on a small board of its own."""
        try:
            board = Board(self.fused, TritonVerifier(), 1, 256, self.device, captures=False)
            board.prepare([[0] * (PREFILL + CATCH_UP)], [replace(request, seed=0)])
            board.read(board.target, 1)
            for arm in [Arm("plain", 0), *arms]:
                for source in parts(drafters[arm.drafter]):
                    name = source.model.name if isinstance(source, ModelDrafter) else None
                    board.prepare([[0] * (CATCH_UP + 2)], [request])
                    board.land(board.launch(name, [0] * arm.gamma, arm.gamma))
            torch.cuda.synchronize(self.device)
        except Exception as error:  # whatever a compiler may throw: PyTorch goes on
            self.problem = f"The kernels cannot be compiled here ({type(error).__name__}: {error}), so PyTorch decodes."
            warnings.warn(self.problem, stacklevel=1)
        else:
            done.set()


class GraphDecoder(SpeculativeDecoder):
    """A `SpeculativeDecoder` whose rounds run as CUDA graphs. Exact like it; model drafters draw by a race instead of one uniform."""

    def __init__(
        self,
        target: LanguageModel,
        drafters: Mapping[str, Drafter],
        tokenizer: Any,
        eos: Iterable[int],
        pool: Pool,
        verifier: Verifier,
    ) -> None:
        super().__init__(target, drafters, tokenizer, eos, pool.device, verifier)
        self.pool = pool
        self._run = _IDLE

    def rounds(self, prompt: Sequence[int], request: Request, policy: Policy) -> Iterator[Round]:
        try:
            yield from super().rounds(prompt, request, policy)
        finally:
            if self._run.board is not None:
                self.pool.give_back(self._run.board)
            self._run = _IDLE

    def wait_until_ready(self, request: Request, arms: Sequence[Arm]) -> None:
        while _is_served(request) and not (self.pool.problem or self.pool.is_ready(request, arms, self.drafters)):
            time.sleep(0.05)

    def batch(
        self, prompts: Sequence[Sequence[int]], requests: Sequence[Request], drafter: str, gammas: Sequence[int]
    ) -> Iterator[tuple[int, Round]]:
        """Decode prompts of any lengths together, each with its own settings, γ, acceptance and end: (row, Round) as they come.

        One drafter serves all, plain or a model; the seconds of a Round are those of the whole batch. Raises ValueError with a sentence
        where the requests cannot run together.
        """
        source = self.drafters.get(drafter)
        if not isinstance(source, PlainDrafter | ModelDrafter):
            raise ValueError(f"A batch drafts with a model or plain, not with {drafter!r}.")
        if len({request.rule for request in requests}) != 1 or any(not _is_served(request) for request in requests):
            raise ValueError("Requests of a batch share one rule and use no penalties, biases or early stop.")
        budgets = [self._budget(prompt, request) for prompt, request in zip(prompts, requests, strict=True)]
        texts, streams = [list(prompt) for prompt in prompts], [TextStream(self.tokenizer, r.stop) for r in requests]
        name, gamma = (source.model.name, max(gammas)) if isinstance(source, ModelDrafter) else (None, 0)
        board = self.pool.take(self.verifier, len(texts), max(map(len, texts)) + max(budgets) + gamma)
        running = dict.fromkeys(range(len(texts)))
        try:
            board.prepare(texts, requests)
            for index in count():
                clock = Clock(torch.device("cpu"))
                rooms = [
                    end - len(text) + len(prompt) for end, text, prompt in zip(budgets, texts, prompts, strict=True)
                ]
                lengths = [max(min(most, room - 1, gamma), 0) for most, room in zip(gammas, rooms, strict=True)]
                flight = board.launch(name, [], gamma, lengths)
                results, seconds = board.land(flight)
                clock.split(*seconds)
                taus = [result[-2] for result in results]
                emissions = [
                    result[gamma : gamma + tau + 1] if row in running else []
                    for row, (result, tau) in enumerate(zip(results, taus, strict=True))
                ]
                board.grow(name, gamma, taus, emissions)
                for row in list(running):
                    if results[row][-1] & UNUSABLE_ROW:
                        raise ValueError(f"{self.target.name} gave logits that are not finite; load it in float32.")
                    block = Block(results[row][: lengths[row]], None, flight.missed)
                    emitted, pieces, stop = self._cut(emissions[row], streams[row], rooms[row], requests[row])
                    outcome = Outcome(taus[row], results[row][gamma + taus[row]], None, board.logits(gamma)[row])
                    tokens = self._describe(block, outcome, len(emitted), pieces, 0)
                    round = Round(
                        index, len(texts[row]), Arm(drafter, gammas[row] if name else 0), lengths[row], requests[row].rule, self.verifier.name,
                        *tokens,
                        tau=min(taus[row], len(emitted)), caught_up=flight.missed, seconds=clock.seconds(),
                        stop="context" if stop == "length" and budgets[row] < requests[row].max_new_tokens else stop, estimates=None,
                    )  # fmt: skip
                    texts[row] += emitted
                    if stop:
                        del running[row]
                    yield row, round
                if not running:
                    return
                board.active.copy_(torch.tensor([row in running for row in range(len(texts))]))
        finally:
            self.pool.give_back(board)

    def _begin(self, committed: list[int], request: Request, policy: Policy) -> None:
        looks_ahead = not policy.waits and policy.dwell == 1 and not request.candidates
        self._run = _Run(_is_served(request), policy, looks_ahead)
        if not self._has_board(committed, request):
            super()._begin(committed, request, policy)

    def _has_board(self, committed: list[int], request: Request) -> bool:
        """Whether the run is on a board; it moves to one as soon as the kernels are compiled."""
        run = self._run
        if run.board is None and run.served and self.pool.is_ready(request, run.policy.arms, self.drafters):
            longest = min(len(committed) + request.max_new_tokens, self.target.context_length)
            run.board = self.pool.take(self.verifier, 1, longest)
            run.board.prepare([committed], [request])
        return run.board is not None

    def _judge(
        self, arm: Arm, gamma: int, room: int, committed: list[int], prompt: int, request: Request, seed: Tensor, clock: Clock
    ) -> tuple[Block, Outcome]:  # fmt: skip
        if not self._has_board(committed, request):
            return super()._judge(arm, gamma, room, committed, prompt, request, seed, clock)
        run, board = self._run, self._run.board
        assert board is not None
        if run.ahead:
            (_, model, full, flight), run.ahead = run.ahead, None
            count = full  # of drafted tokens
        else:
            model, ids = self._source(arm.drafter, gamma, committed)
            count = gamma if model is not None else len(ids)
            full = arm.gamma if count else 0
            flight = board.launch(model, ids, full, None if count == full else [count])
        if run.looks_ahead:
            run.ahead = self._look_ahead(model, full, room, len(committed))
        [result], seconds = board.land(flight)
        clock.split(*seconds)
        drafted, tokens, (tau, status) = result[:count], result[full:-2], result[-2:]
        if status & UNUSABLE_ROW:
            raise ValueError(
                f"{self.target.name} gave logits that are not finite; load it in float32 or check its weights."
            )
        board.grow(model, full, [tau], [tokens[: tau + 1]])
        logits, grounds = board.logits(full)[:, : count + 1], None
        if request.candidates:
            draft, settings = board.draft(full, model is not None), Settings.of(request.sampling, 1, self.device)
            soft = None if draft.logits is None else draft.logits[:, :count]
            draft, position = Draft(draft.ids[:, :count], logits=soft), torch.full_like(seed, len(committed))
            grounds = ReferenceVerifier().explain(logits, draft, settings, request.rule, seed, position).grounds
        return Block(drafted, None, flight.missed), Outcome(tau, tokens[tau], grounds, logits[0])

    def _look_ahead(self, model: str | None, gamma: int, room: int, length: int) -> Ahead | None:
        """Start the next round before the present one, γ tokens of `model`, has landed; None where it needs to know how that one ends."""
        run = self._run
        chosen = run.policy.select(run.context)
        arm = run.policy.arms[int(chosen[0])]
        drafter, name = self.drafters[arm.drafter], None
        if isinstance(drafter, ModelDrafter):
            name = drafter.model.name if arm.gamma else None
        elif not isinstance(drafter, PlainDrafter):
            return None
        longest = gamma + 1 + arm.gamma
        if room <= longest or (name and (name != model or length + longest > self.pool.fused[name].context_length)):
            return None  # a short round, a drafter with something to catch up with, or one whose context may end
        assert run.board is not None
        return Ahead(chosen, name, arm.gamma, run.board.launch(name, [], arm.gamma, catch_up=False))

    def _select(self, policy: Policy, context: Context) -> Any:
        self._run.context = context
        return self._run.ahead.chosen if self._run.ahead else policy.select(context)

    def _settle(self, committed: list[int]) -> None:
        if self._run.board is None:
            super()._settle(committed)

    def _unread(self, name: str, committed: list[int]) -> int:
        if self._run.board is None:
            return super()._unread(name, committed)
        models = [part.model.name for part in parts(self.drafters[name]) if isinstance(part, ModelDrafter)]
        return max((len(committed) - self._run.board.held[model][0] for model in models), default=0)

    def _clock(self, **laps: float) -> Clock:
        return Clock(self.device if self._run.board is None else torch.device("cpu"), **laps)

    def _source(self, name: str, gamma: int, committed: list[int]) -> tuple[str | None, list[int]]:
        """Which model drafts in this round, or else which ids are drafted."""
        drafter = self.drafters[name]
        for part in parts(drafter):
            if isinstance(part, LookupDrafter):
                part.catch_up(committed)
                if ids := part.block(gamma):
                    ends = [i for i, id in enumerate(ids) if id in self.eos]
                    return None, ids[: ends[0] + 1] if ends else ids
            elif isinstance(part, ModelDrafter) and gamma:
                room = self.pool.fused[part.model.name].context_length
                return (part.model.name, []) if len(committed) + gamma <= room else (None, [])
        return None, []


class Ahead(NamedTuple):
    """A round under way that was not asked for yet: its arm [1], the model that drafts and how far."""

    chosen: Any
    model: str | None
    gamma: int
    flight: Flight


@dataclass
class _Run:
    """What one run of a GraphDecoder knows."""

    served: bool  # by the graphs
    policy: Policy
    looks_ahead: bool
    board: Board | None = None
    context: Context = field(default_factory=Context)  # in which the present round began
    ahead: Ahead | None = None


_IDLE = _Run(False, Fixed(Arm("plain", 0)), False)


def parts(drafter: Drafter) -> tuple[Drafter, ...]:
    """A drafter as the drafters that it tries in turn."""
    return (drafter.lookup, drafter.otherwise) if isinstance(drafter, LookupElseDrafter) else (drafter,)


def _is_served(request: Request) -> bool:
    return not request.sampling.adjusts and request.stop_below == 0
