"""`flashspec bench decode`: FlashSpec against what people would use instead, on the same prompts, alternating, by the clock.

Contestants answer a prompt one after the other in an order that turns. A time is a whole request, prompt included, as a user waits
for it. The rate of a contestant is the median over requests; ratios are of medians. transformers runs the original weights in their own
precision; FlashSpec's target on a CPU is the same model laid out as the table says.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from typing import Any

import numpy as np
import torch

from flashspec import bandits
from flashspec.bandits import Fixed, Policy
from flashspec.calibration import measure_costs
from flashspec.engine import Request, SpeculativeDecoder
from flashspec.machine import describe
from flashspec.models.catalog import Family
from flashspec.records import Arm
from flashspec.sampling import SamplingParams

REFERENCE, PLAIN = "transformers generate", "FlashSpec plain"
Contestant = Callable[[list[int], int], tuple[list[int], float | None]]  # prompt, seed -> new ids, seconds to the first


@dataclass
class Tally:
    """What a contestant did: seconds and ids of every request, the first of which is cold."""

    seconds: list[float] = field(default_factory=list)
    first: list[float | None] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)

    @property
    def rates(self) -> np.ndarray:
        """Tokens per second of every request but the cold first one."""
        return np.array([len(ids) / s for ids, s in zip(self.ids, self.seconds, strict=True)])[1:]


@dataclass(frozen=True)
class Line:
    """One contestant. Rates in tokens per second; cold: seconds of the very first request; first: median seconds to the first token."""

    method: str
    rate: float
    low: float
    high: float
    of_reference: float
    of_plain: float
    cold: float
    first: float | None
    tokens: int
    digest: str  # of all ids
    differs: int  # requests whose greedy ids differ from FlashSpec's plain ones
    gap: float | None  # the largest difference of the two best logits where they first differ


def run(
    family: Family,
    prompts: Mapping[str, Sequence[str]],
    *,
    temperature: float = 0.0,
    rule: str = "block",
    tokens: int = 128,
    source: str = "ours",
    gguf: str | None = None,
    write: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure and print; returns the result as plain data. gguf: a file for llama.cpp, where llama-cpp-python is installed.

    Raises ValueError with a sentence where llama.cpp is asked for and not there.
    """
    request = Request(tokens, SamplingParams(temperature=temperature), rule, candidates=0)
    contestants = _contestants(family, request, gguf)
    tallies = {name: Tally() for name in contestants}
    asked = [family.encode(prompt) for some in prompts.values() for prompt in some]
    asked = [asked[0], *asked]  # the first request of every contestant is the cold one
    for number, prompt in enumerate(asked):
        names = list(contestants)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            began = time.perf_counter()
            ids, first = contestants[name](prompt, number)
            tallies[name].seconds.append(time.perf_counter() - began)
            tallies[name].ids.append(ids)
            tallies[name].first.append(first)
    lines = [_line(name, tallies, asked, family, temperature == 0) for name in contestants]
    machine = describe(family.target, family.layout)
    write(
        f"{family.name}, T = {temperature:g}, {tokens} tokens, {len(asked) - 1} requests; {machine['device']}, {machine['dtype']}\n"
    )
    write(f"{'':34}{'tok/s':>8}{'quartiles':>16}{'× transformers':>16}{'× plain':>9}{'cold s':>8}{'first s':>9}  ids")
    for line in lines:
        wait = f"{line.first:.3f}" if line.first is not None else "–"
        quartiles = f"{line.low:.1f}–{line.high:.1f}"
        ratios = f"{line.of_reference:16.2f}{line.of_plain:9.2f}"
        write(f"{line.method:34}{line.rate:8.1f}{quartiles:>16}{ratios}{line.cold:8.2f}{wait:>9}  {line.digest}")
        if line.differs:
            write(
                f"{'':34}differs from plain in {line.differs} requests; largest gap of the two best logits there: {line.gap:.3f}"
            )
    return {
        "family": family.name, "prompts": source, "machine": machine, "date": date.today().isoformat(),
        "temperature": temperature, "rule": rule, "tokens": tokens, "requests": len(asked) - 1,
        "lines": [asdict(line) for line in lines],
    }  # fmt: skip


def _contestants(family: Family, request: Request, gguf: str | None) -> dict[str, Contestant]:
    decoder, arms = family.decoder(), family.arms()
    costs = measure_costs(decoder, arms, request)
    assistant = list(family.models)[-1]
    found: dict[str, Contestant] = {REFERENCE: _transformers(family, request, None)}
    found[f"transformers assisted by {assistant}"] = _transformers(family, request, assistant)
    found[PLAIN] = _ours(decoder, request, Fixed(Arm("plain", 0)))
    few = (Arm("lookup", 3), Arm(assistant, 2), Arm(assistant, 3), Arm(f"lookup-else-{assistant}", 3))
    for arm in arms[1:] if family.pool else few:  # a GPU has the time for all of them
        found[f"FlashSpec {arm}"] = _ours(decoder, request, Fixed(arm))
    found["FlashSpec bandit"] = _ours(decoder, request, bandits.policy(bandits.DEFAULT, arms, costs))
    if gguf:
        found["llama.cpp plain"] = _llama(gguf, request)
    return found


def _ours(decoder: SpeculativeDecoder, request: Request, policy: Policy) -> Contestant:
    def answer(prompt: list[int], seed: int) -> tuple[list[int], float | None]:
        began, first, ids = time.perf_counter(), None, list[int]()
        for round in decoder.rounds(prompt, replace(request, seed=seed), policy):
            first = first or time.perf_counter() - began
            ids += round.emitted
        return ids, first

    return answer


def _transformers(family: Family, request: Request, assistant: str | None) -> Contestant:
    return lambda prompt, seed: (generate(family, [prompt], request, seed, assistant)[0], None)


@torch.inference_mode()
def generate(
    family: Family, asked: Sequence[list[int]], request: Request, seed: int, assistant: str | None = None
) -> list[list[int]]:
    """The library's own loop, with a model drafter or without; prompts of different length are filled up on the left. New ids of each."""
    torch.manual_seed(seed)
    sampling, longest, pad = request.sampling, max(map(len, asked)), min(family.eos)
    how: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if sampling.temperature > 0:
        how = {"do_sample": True, "temperature": sampling.temperature, "top_p": 1.0, "top_k": 0}
    if assistant:
        how["assistant_model"] = family.models[assistant]
    device = family.target.device
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in asked], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in asked], device=device)
    out = family.target.generate(
        ids, attention_mask=mask, max_new_tokens=request.max_new_tokens, pad_token_id=pad, **how
    )
    return out[:, longest:].tolist()


def _llama(gguf: str, request: Request) -> Contestant:
    try:
        from llama_cpp import Llama
    except ImportError:
        raise ValueError(
            "llama.cpp is asked for, but llama-cpp-python is not installed; leave --gguf out or install it."
        ) from None

    model = Llama(gguf, n_ctx=2048, n_threads=torch.get_num_threads(), verbose=False)

    def answer(prompt: list[int], seed: int) -> tuple[list[int], float | None]:
        model.reset()
        model.set_seed(seed)
        ids: list[int] = []
        for token in model.generate(prompt, temp=request.sampling.temperature, top_k=0, top_p=1.0):
            ids.append(int(token))
            if token == model.token_eos() or len(ids) == request.max_new_tokens:
                break
        return ids, None

    return answer


def _line(name: str, tallies: Mapping[str, Tally], asked: Sequence[list[int]], family: Family, greedy: bool) -> Line:
    tally = tallies[name]
    low, rate, high = (float(v) for v in np.quantile(tally.rates, (0.25, 0.5, 0.75)))
    firsts = [value for value in tally.first[1:] if value is not None]
    differs, gap = 0, None
    if greedy and name.startswith("FlashSpec"):
        pairs = zip(asked, tally.ids, tallies[PLAIN].ids, strict=True)
        gaps = [_gap(family, prompt, ids, plain) for prompt, ids, plain in pairs if ids != plain]
        differs, gap = len(gaps), max(gaps, default=None)
    digest = hashlib.sha256(np.array([token for ids in tally.ids for token in ids], np.int64).tobytes()).hexdigest()[:8]
    return Line(
        name, rate, low, high, rate / float(np.median(tallies[REFERENCE].rates)), rate / float(np.median(tallies[PLAIN].rates)),
        tally.seconds[0], float(np.median(firsts)) if firsts else None, sum(map(len, tally.ids)), digest, differs, gap,
    )  # fmt: skip


def _gap(family: Family, prompt: list[int], ids: list[int], plain: list[int]) -> float:
    """How far apart the two best logits are where `ids` first leaves `plain`: a near tie explains it, anything else is a fault."""
    at = next((i for i, (a, b) in enumerate(zip(ids, plain, strict=False)) if a != b), min(len(ids), len(plain)))
    best = family.decoder().target.read([*prompt, *plain[:at]])[0, -1].float().topk(2).values
    return float(best[0] - best[1])
