"""`flashspec bench batch`: prompts of different length decoded together, on a GPU, against transformers doing the same.

Every row has its own prompt; 1, 2, 4 … rows are decoded by each contestant in turns, and the rate is that of all rows together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from typing import Any

import numpy as np
import torch

from flashspec.bench.decode import generate
from flashspec.engine import Request
from flashspec.machine import describe
from flashspec.models.catalog import Family
from flashspec.sampling import SamplingParams

ROWS = (1, 2, 4, 8, 16, 32)


def run(
    family: Family,
    prompts: Mapping[str, Sequence[str]],
    *,
    temperature: float = 0.0,
    rule: str = "block",
    tokens: int = 128,
    gamma: int = 3,
    passes: int = 3,
    rows: Sequence[int] = ROWS,
    source: str = "ours",
    write: Callable[[str], None] = print,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Measure and print tokens per second of all rows together; `keep` gets the result as it grows.

    Raises ValueError with a sentence without a GPU.
    """
    if family.pool is None:
        raise ValueError("Batches are decoded on a GPU, by models of plain Llama form; there is none here.")
    every = [family.encode(prompt) for some in zip(*prompts.values(), strict=False) for prompt in some]
    drafter = list(family.models)[-1]
    request = Request(tokens, SamplingParams(temperature=temperature), rule, candidates=0)
    contestants: dict[str, Callable[[list[list[int]], int], int]] = {
        "transformers generate": lambda asked, seed: _transformers(family, asked, request, seed),
        "FlashSpec plain": lambda asked, seed: _ours(family, asked, request, seed, "plain", 0),
        f"FlashSpec {drafter} γ={gamma}": lambda asked, seed: _ours(family, asked, request, seed, drafter, gamma),
    }
    machine = describe(family.target, family.layout)
    write(f"{family.name}, T = {temperature:g}, {tokens} tokens a row; {machine['device']}, {machine['dtype']}\n")
    write(f"{'rows':>5}" + "".join(f"{name:>26}" for name in contestants) + "   tok/s of all rows together")
    lines: list[dict[str, Any]] = []
    result = {
        "family": family.name, "prompts": source, "machine": machine, "date": date.today().isoformat(),
        "temperature": temperature, "rule": rule, "tokens": tokens, "lines": lines,
    }  # fmt: skip
    for count in rows:
        asked = [every[i % len(every)] for i in range(count)]
        rates: dict[str, list[float]] = {name: [] for name in contestants}
        for turn in range(passes + 1):
            for name, answer in contestants.items():
                began = time.perf_counter()
                written = answer(asked, turn)
                torch.cuda.synchronize()
                rates[name].append(written / (time.perf_counter() - began))
        medians = {name: float(np.median(values[1:])) for name, values in rates.items()}  # the first pass warms up
        write(f"{count:>5}" + "".join(f"{medians[name]:>26.0f}" for name in contestants))
        lines.append({"rows": count, "rates": medians})
        keep(result)
    return result


def _ours(family: Family, asked: list[list[int]], request: Request, seed: int, drafter: str, gamma: int) -> int:
    requests = [replace(request, seed=seed * 1000 + row) for row in range(len(asked))]
    rounds = family.decoder().batch(asked, requests, drafter, [gamma] * len(asked))  # type: ignore[attr-defined]
    return sum(len(round.emitted) for _, round in rounds)


def _transformers(family: Family, asked: list[list[int]], request: Request, seed: int) -> int:
    """Tokens up to the end of each row count; what fills up a shorter one does not."""
    rows = generate(family, asked, request, seed)
    return sum(next((i + 1 for i, id in enumerate(row) if id in family.eos), len(row)) for row in rows)
