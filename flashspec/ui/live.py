"""One run of the engine as a stream of small JSON messages for the page. Knows no Gradio.

A message: {"run", "seq", "rounds", "totals", …}. `seq` counts from 0 within a run. Until the first round there is a "note" on what is being
waited for; the second has "head" (`ui.wire.head`), the last "done" and perhaps "error"; when the text is finished one more brings "regret"
(`ui.analysis`). Rounds are in the form of `ui.wire`.
"""

from __future__ import annotations

import copy
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from threading import RLock, Thread
from typing import Any, NamedTuple

from flashspec import bandits
from flashspec.bandits import CostTable, Fixed, Policy
from flashspec.calibration import measure_costs
from flashspec.engine import Request, SpeculativeDecoder
from flashspec.machine import describe
from flashspec.models.catalog import Family, check_family, load_family
from flashspec.records import Arm, Round, Totals, Trace
from flashspec.sampling import SamplingParams
from flashspec.ui import analysis, wire

FLUSH_SECONDS = 0.08  # a message at most every 80 ms: more a second reach no eye and cost the browser
MAX_PROMPT = 4000  # characters
MAX_TOKENS = 512
MAX_SECONDS = 120.0
LARGEST = 2**31 - 1  # of any setting
CANDIDATES = 5  # entries of p and q shown for a token
READING = "Reading the prompt …"
BANDIT = "bandit"  # what the drafter's control says where a policy chooses


@dataclass(frozen=True)
class Controls:
    """The page's settings, in the order of its controls."""

    prompt: str
    family: str
    drafter: str  # a drafter's name, or BANDIT
    gamma: int
    rule: str
    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int
    verifier: str
    policy: str = bandits.DEFAULT
    top_k: int = 0


class Run(NamedTuple):
    """A run about to begin."""

    family: Family
    decoder: SpeculativeDecoder
    prompt: list[int]
    request: Request
    arms: tuple[Arm, ...]  # all that a policy may choose among, whoever chooses in this run
    policy: Policy
    label: str  # who chooses: a policy's name or the fixed arm

    def rounds(self) -> Iterator[Round]:
        return self.decoder.rounds(self.prompt, self.request, self.policy)

    def trace(self, prompt: str, rounds: Sequence[Round] = ()) -> Trace:
        """The record of the run so far."""
        settings = {**asdict(self.request), "arm": self.label}
        machine = describe(self.family.target, self.family.layout)
        return Trace(self.family.name, prompt, len(self.prompt), settings, machine, tuple(rounds))


# What all sessions share, read-only. Who needs a part that is being made waits for it, instead of making it again.
_families: dict[str, Family] = {}
_tables: dict[tuple[Any, ...], CostTable] = {}
_making = RLock()


def load_behind(name: str) -> None:
    """Start loading family `name` while the page comes up. Raises ValueError, with a sentence, where it is not on this machine; what
    else may be wrong with it, a run will say."""
    check_family(name)
    if os.environ.get("SPACES_ZERO_GPU"):  # only what the main thread loads before launch can be lent a GPU
        family(name)
        return

    def load() -> None:
        with suppress(ValueError):
            family(name)

    Thread(target=load).start()  # not a daemon: torch cannot be left in the middle when the interpreter ends


def family(name: str) -> Family:
    """The models of a family, loaded once. Raises ValueError with a sentence where they cannot be had."""
    with _making:
        if name not in _families:
            _families[name] = load_family(name)
        return _families[name]


def costs(controls: Controls) -> CostTable:
    """What the arms cost here, a fixed arm of the controls among them. Measured once for each setting that changes it; a copy, since
    runs refresh theirs."""
    with _making:
        loaded = family(controls.family)
        more = None if controls.drafter == BANDIT else loaded.arm(controls.drafter, int(controls.gamma))
        key, arms = (_kind(controls), more), loaded.arms()
        if key not in _tables:
            sampling = SamplingParams(temperature=0.0 if controls.temperature == 0 else 0.7)
            request = Request(64, sampling, controls.rule, candidates=CANDIDATES)
            if more is not None and more not in arms:
                arms = (*arms, more)
            _tables[key] = measure_costs(loaded.decoder(controls.verifier), arms, request)
        return copy.deepcopy(_tables[key])


def _kind(controls: Controls) -> tuple[Any, ...]:
    """The settings that change what a round costs."""
    return controls.family, controls.verifier, controls.rule, controls.temperature == 0


def _note(controls: Controls) -> str:
    """What the reader waits for before the first token."""
    if controls.family not in _families:
        return "Loading the models, once …"
    if controls.drafter == BANDIT and (_kind(controls), None) not in _tables:
        return "Timing every drafter on this machine, once …"
    return READING


def prepare(controls: Controls) -> Run:
    """Check the controls and make everything ready; raises ValueError with a sentence for the reader."""
    if len(controls.prompt) > MAX_PROMPT:
        raise ValueError(f"The prompt has {len(controls.prompt):,} characters; shorten it to {MAX_PROMPT:,}.")
    numbers = {
        "Draft length": controls.gamma, "Tokens": controls.max_new_tokens, "Seed": controls.seed, "Temperature": controls.temperature,
        "Top-p": controls.top_p, "Top-k": controls.top_k,
    }  # fmt: skip
    for name, value in numbers.items():
        if value is None:
            raise ValueError(f"{name} is empty; enter a number.")
        if not -LARGEST <= value <= LARGEST:  # infinities and what is no number fail too
            raise ValueError(f"{name} is {value}; enter a number that a person would.")
    if controls.max_new_tokens > MAX_TOKENS:
        raise ValueError(
            f"{controls.max_new_tokens} tokens are more than this page gives; choose at most {MAX_TOKENS}."
        )
    if controls.gamma < 0:
        raise ValueError("The draft length is negative; choose 0 (no drafting) or more.")
    bandits.check_name(controls.policy)
    sampling = SamplingParams(controls.temperature, int(controls.top_k), controls.top_p)
    request = Request(int(controls.max_new_tokens), sampling, controls.rule, int(controls.seed), candidates=CANDIDATES)
    loaded = family(controls.family)
    prompt, decoder, arms = loaded.encode(controls.prompt), loaded.decoder(controls.verifier), loaded.arms()
    if controls.drafter != BANDIT:
        arm = loaded.arm(controls.drafter, int(controls.gamma))
        return Run(loaded, decoder, prompt, request, arms, Fixed(arm), str(arm))
    chooser = bandits.policy(controls.policy, arms, costs(controls), seed=int(controls.seed))
    return Run(loaded, decoder, prompt, request, arms, chooser, controls.policy)


def messages(
    controls: Controls,
    clock: Callable[[], float] = time.monotonic,
    analysed: bool = True,
    lane: str = "",
    keep: Callable[[Trace, dict[str, Any] | None], None] = lambda trace, regret: None,
) -> Iterator[str]:
    """Messages of one run, batched; the last but one, or the last, has "done". Closing the iterator ends the run within a round.

    analysed: add regret by exact replay when the text is finished; `keep` is then given it with the trace. lane: a name that every message
    carries, where several runs are shown.
    """
    stream = _Stream(lane)
    yield stream.message(note=_note(controls))  # empties the page at once
    kept: list[Round] = []
    try:
        run = prepare(controls)
        yield stream.message(note=READING, head=wire.head(run.trace(controls.prompt), run.arms))
        began = flushed = clock()
        with closing(run.rounds()) as rounds:  # type: ignore[type-var]
            for round in rounds:
                kept.append(round)
                stream.add(round)
                if clock() - began > MAX_SECONDS and not round.stop:
                    yield stream.message(
                        done=True, error=f"Stopped after {MAX_SECONDS:.0f} seconds, the limit of this page."
                    )
                    return
                if clock() - flushed >= FLUSH_SECONDS:
                    yield stream.message()
                    flushed = clock()
    except ValueError as error:
        yield stream.message(done=True, error=str(error))
        return
    yield stream.message(done=True)
    if analysed and kept:
        trace = run.trace(controls.prompt, kept)
        found = analysis.regret_of(trace, run.decoder, run.arms, costs(controls), run.prompt)
        keep(trace, found)
        yield stream.message(done=True, regret=found)


def generate(controls: Controls) -> Trace:
    """A whole run as one Trace; raises ValueError with a sentence. For programs that call the page."""
    run, kept = prepare(controls), list[Round]()
    began = time.monotonic()
    with closing(run.rounds()) as rounds:  # type: ignore[type-var]
        for round in rounds:
            kept.append(round)
            if time.monotonic() - began > MAX_SECONDS:
                break
    return run.trace(controls.prompt, kept)


def race(controls: Controls, against: str) -> Iterator[str]:
    """Two runs after one another, each alone on the machine, as messages with "lane" "a" or "b".

    against: "plain" runs plain decoding first; "verifier" runs the same settings with PyTorch, then with Triton.
    """
    first = (
        replace(controls, verifier="torch") if against == "verifier" else replace(controls, drafter="plain", gamma=0)
    )
    second = replace(controls, verifier="triton") if against == "verifier" else controls
    for lane, some in (("a", first), ("b", second)):
        failed = False
        for message in messages(some, analysed=False, lane=lane):
            failed = failed or '"error"' in message
            yield message
        if failed:
            return


class _Stream:
    """Numbers the messages of a run and holds what the next one brings."""

    def __init__(self, lane: str) -> None:
        self._run, self._seq, self._lane = uuid.uuid4().hex[:8], 0, lane
        self._waiting: list[Round] = []
        self._total = Totals()

    def add(self, round: Round) -> None:
        self._waiting.append(round)
        self._total = self._total.plus(round)

    def message(self, **more: Any) -> str:
        body = {
            "run": self._run, "seq": self._seq, "rounds": [wire.pack(round) for round in self._waiting],
            "totals": wire.figures(self._total), **({"lane": self._lane} if self._lane else {}), **more,
        }  # fmt: skip
        self._seq, self._waiting = self._seq + 1, []
        return json.dumps(body, separators=(",", ":"), ensure_ascii=False)
