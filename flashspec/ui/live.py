"""One run of the engine as a stream of small JSON messages for the page. Knows no Gradio.

A message: {"run", "seq", "rounds", "totals", "done", "error"}. `seq` counts from 0 within a run; a round is
{"i", "arm", "rule", "backend", "stop",
 "drafted": [[text, piece, verdict, id, p, q, threshold, uniform], …], "next": [text, piece, kind, id, p] | null}.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from flashspec.bandits import Fixed
from flashspec.engine import Request
from flashspec.models.catalog import Family, load_family
from flashspec.records import Round, Totals
from flashspec.sampling import SamplingParams

FLUSH_SECONDS = 0.08  # a message at most every 80 ms: more a second reach no eye and cost the browser
MAX_PROMPT = 4000  # characters
MAX_TOKENS = 512
MAX_SECONDS = 120.0


@dataclass(frozen=True)
class Controls:
    """The page's settings, in the order of its controls."""

    prompt: str
    family: str
    drafter: str
    gamma: int
    rule: str
    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int
    verifier: str


@lru_cache(maxsize=4)
def family(name: str) -> Family:
    """Models are loaded once and shared by every session, read-only."""
    return load_family(name)


def start(controls: Controls) -> Iterator[Round]:
    """Check the controls and begin; raises ValueError with a sentence for the reader."""
    if len(controls.prompt) > MAX_PROMPT:
        raise ValueError(f"The prompt has {len(controls.prompt):,} characters; shorten it to {MAX_PROMPT:,}.")
    for name, value in (("Draft length", controls.gamma), ("Tokens", controls.max_new_tokens), ("Seed", controls.seed)):
        if value is None:
            raise ValueError(f"{name} is empty; enter a number.")
    if controls.max_new_tokens > MAX_TOKENS:
        raise ValueError(
            f"{controls.max_new_tokens} tokens are more than this page gives; choose at most {MAX_TOKENS}."
        )
    if controls.gamma < 0:
        raise ValueError("The draft length is negative; choose 0 (no drafting) or more.")
    sampling = SamplingParams(temperature=controls.temperature, top_p=controls.top_p)
    request = Request(int(controls.max_new_tokens), sampling, controls.rule, int(controls.seed))
    loaded = family(controls.family)
    arm = loaded.arm(controls.drafter, int(controls.gamma))
    return loaded.decoder(controls.verifier).rounds(loaded.encode(controls.prompt), request, Fixed(arm))


def messages(controls: Controls, clock: Callable[[], float] = time.monotonic) -> Iterator[str]:
    """Messages of one run, batched; the last has "done". Closing the iterator ends the run within a round."""
    run, seq, total = uuid.uuid4().hex[:8], 0, Totals()
    waiting: list[Round] = []

    def message(**more: Any) -> str:
        nonlocal seq, waiting
        body = {"run": run, "seq": seq, "rounds": [wire(round) for round in waiting], "totals": _figures(total), **more}
        seq, waiting = seq + 1, []
        return json.dumps(body, separators=(",", ":"), ensure_ascii=False)

    yield message()  # empties the page at once
    try:
        began = flushed = clock()
        with closing(start(controls)) as rounds:  # type: ignore[type-var]
            for round in rounds:
                waiting.append(round)
                total = total.plus(round)
                if clock() - began > MAX_SECONDS and not round.stop:
                    yield message(done=True, error=f"Stopped after {MAX_SECONDS:.0f} seconds, the limit of this page.")
                    return
                if clock() - flushed >= FLUSH_SECONDS:
                    yield message()
                    flushed = clock()
    except ValueError as error:
        yield message(done=True, error=str(error))
        return
    yield message(done=True)


def wire(round: Round) -> dict[str, Any]:
    """A Round as the browser gets it: short keys, probabilities with four digits."""
    return {
        "i": round.index,
        "arm": str(round.arm),
        "rule": round.rule,
        "backend": round.backend,
        "drafted": [
            [d.text, d.piece, d.verdict, d.id, _short(d.p), _short(d.q), _short(d.threshold), _short(d.uniform)]
            for d in round.drafted
        ],
        "next": [round.next.text, round.next.piece, round.next.kind, round.next.id, _short(round.next.p)]
        if round.next
        else None,
        "stop": round.stop,
    }


def _figures(total: Totals) -> dict[str, Any]:
    return {
        "tokens": total.tokens,
        "rounds": total.rounds,
        "drafted": total.drafted,
        "accepted": total.accepted,
        "seconds": round(total.seconds, 4),
    }


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
