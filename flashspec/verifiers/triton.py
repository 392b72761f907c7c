"""Verification by the fused Triton kernels of `kernels/`: same call, same bits and same tokens as the reference.

On a GPU nothing is read by the host. Without one, the same kernels run in Triton's interpreter, slowly, for tests and teaching.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from flashspec.kernels import thresholds as threshold_source  # type: ignore[attr-defined]  # found through __path__
from flashspec.kernels import verify as source  # type: ignore[attr-defined]
from flashspec.verifiers.base import Draft, Settings, Verdict

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The kernels' own names for the forms of a draft and for the parts of the work.
ONE_HOT, LOGITS, LOGITS_LSE, PROBABILITIES = (
    constant.value for constant in (source.ONE_HOT, source.LOGITS, source.LOGITS_LSE, source.PROBABILITIES)
)
ALL, STATISTICS, SURPLUS, DRAW = (
    constant.value for constant in (source.ALL, source.STATISTICS, source.SURPLUS, source.DRAW)
)
SPLITS = 32  # at most: the tests of a request read their partials within a warp
SHARES = 512  # at most: programs that share a race
BARRIER_SMS = 16  # smaller devices take the schedule without waiting: other work may keep a program from starting
BITS = {torch.bfloat16: 16, torch.float16: 20, torch.float32: 32}


class TritonVerifier:
    """See `base.Verifier` for shapes. Workspaces are kept by shape; one verifier serves one stream at a time.

    schedule: "fused" (one launch, programs wait for each other), "split" (launches that never wait) or "auto".
    """

    def __init__(self, schedule: str = "auto") -> None:
        self.name = "triton (interpreted)" if INTERPRETED else "triton"
        self._schedule = schedule
        self._plans: dict[tuple, _Plan] = {}

    def verify(
        self, logits: Tensor, draft: Draft, settings: Settings, rule: str, seed: Tensor, position: Tensor
    ) -> Verdict:
        plan, given = self._plan(logits, draft, settings, rule)
        return plan(plan.arguments(logits, given, draft, settings, seed, position), logits, given, settings)

    def bind(
        self, logits: Tensor, draft: Draft, settings: Settings, rule: str, seed: Tensor, position: Tensor
    ) -> Callable[[], Verdict]:
        """The same call frozen: for a decode loop whose tensors stay where they are. Costs the launches and nothing else."""
        plan, given = self._plan(logits, draft, settings, rule)
        arguments = plan.arguments(logits, given, draft, settings, seed, position)
        verdict = plan(arguments, logits, given, settings)  # compiles
        if plan.truncates or INTERPRETED:
            return lambda: plan(arguments, logits, given, settings)
        launches = [partial(launch.run, *arguments, *launch.integers) for launch in plan.launches if launch.run]

        def run() -> Verdict:
            for launch in launches:
                launch()
            return verdict

        return run

    def _plan(self, logits: Tensor, draft: Draft, settings: Settings, rule: str) -> tuple[_Plan, Tensor]:
        form, given = _form(draft, logits)
        aligned = (logits.data_ptr() | given.data_ptr()) % 16 == 0
        key = (
            logits.shape, logits.stride(), given.stride(), logits.dtype, given.dtype, form, rule, settings.cuts, aligned, logits.get_device(),
        )  # fmt: skip
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _Plan(logits, given, form, rule, settings.cuts, self._schedule)
        return plan, given


def _form(draft: Draft, logits: Tensor) -> tuple[int, Tensor]:
    """In what form q is given, and the tensor that holds it."""
    if draft.q is not None:
        return PROBABILITIES, draft.q
    if draft.logits is not None:
        return (LOGITS if draft.lse is None else LOGITS_LSE), draft.logits
    return ONE_HOT, logits


class _Plan:
    """Everything that depends on shapes alone: workspace, grids, compiled kernels. Called once a block."""

    def __init__(
        self, logits: Tensor, given: Tensor, form: int, rule: str, cuts: tuple[bool, bool, bool], schedule: str
    ) -> None:
        if rule not in ("token", "block", "coupled"):
            raise ValueError(f"The Triton verifier has no rule {rule!r}; use the PyTorch verifier for it.")
        if logits.stride(-1) != 1 or given.stride(-1) != 1:
            raise ValueError(
                "The Triton verifier needs logits whose vocabulary entries lie side by side; call .contiguous()."
            )
        device = logits.device
        batch, rows, vocabulary = logits.shape
        if vocabulary >= 2**24:
            raise ValueError(f"A vocabulary of {vocabulary} entries is too large for this kernel, whose limit is 2^24.")
        self.gamma = rows - 1
        self.cuts, self.form = cuts, form
        self.truncates = any(cuts)
        self.chooses = rule == "coupled" or self.gamma == 0
        if form == LOGITS_LSE and self.truncates:
            self.form = LOGITS  # a log-sum-exp of the whole row says nothing about a cut one
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        self.tokens = torch.empty(batch, rows, dtype=torch.int64, device=device)
        self.tau = torch.empty(batch, dtype=torch.int32, device=device)
        self.status = torch.empty(batch, dtype=torch.int32, device=device)
        self.full = torch.full((batch,), self.gamma, dtype=torch.int32, device=device)
        self.nothing = torch.zeros(1, dtype=torch.float32, device=device)
        self.target_threshold = self.draft_threshold = self.nothing
        if self.truncates:
            self.target_threshold = torch.empty(batch, rows, dtype=torch.float32, device=device)
            self.draft_threshold = torch.full((batch, max(self.gamma, 1)), float("-inf"), device=device)
        build = self._choose_launches if self.chooses else self._verify_launches
        self.launches: list[_Launch] = build(batch, vocabulary, logits, given, rule, schedule, multiprocessors)

    def arguments(
        self, logits: Tensor, given: Tensor, draft: Draft, settings: Settings, seed: Tensor, position: Tensor
    ) -> tuple[Tensor, ...]:
        """The tensors of a call in the order of the kernel."""
        num_draft = self.full if draft.num_draft is None else draft.num_draft
        temperature = settings.temperature
        if self.chooses:
            return (
                logits, draft.ids, num_draft, temperature, seed, position, self.target_threshold, self.keys, self.counts,
                self.tokens, self.tau, self.status,
            )  # fmt: skip
        lse = self.nothing if draft.lse is None else draft.lse
        return (
            logits, given, draft.ids, num_draft, temperature, temperature, seed, position, lse, self.target_threshold,
            self.draft_threshold, self.parts, self.keys, self.counts, self.tokens, self.tau, self.status,
        )  # fmt: skip

    def __call__(self, arguments: tuple[Tensor, ...], logits: Tensor, given: Tensor, settings: Settings) -> Verdict:
        if self.truncates:
            row_thresholds(logits, settings, self.target_threshold)
            if self.form == LOGITS and not self.chooses:
                row_thresholds(given, settings, self.draft_threshold)
        for launch in self.launches:
            launch(arguments)
        return Verdict(self.tokens, self.tau, self.status)

    def _verify_launches(
        self, batch: int, vocabulary: int, logits: Tensor, given: Tensor, rule: str, schedule: str, multiprocessors: int
    ) -> list[_Launch]:
        gamma, block_rule = self.gamma, rule == "block"
        fused = schedule == "fused" or (
            schedule == "auto" and _prefers_fused(batch, gamma, vocabulary, multiprocessors)
        )
        shape = _shape(batch, gamma, vocabulary, multiprocessors, fused)
        self.parts = torch.empty(3 * batch * gamma * shape.splits, dtype=torch.float32, device=logits.device)
        self.keys = torch.empty(batch * shape.shares, dtype=torch.int64, device=logits.device)
        self.counts = torch.zeros(3 * batch + 1, dtype=torch.int32, device=logits.device)
        strides = (logits.stride(0), logits.stride(1), given.stride(0), given.stride(1))
        # Sixteen bytes at a time where every row begins on such a boundary.
        wide = all(x % 16 == 0 for x in (vocabulary, *strides, logits.data_ptr(), given.data_ptr()))
        vector = (4 if logits.element_size() == 4 else 8) if wide else 1
        integers = (vocabulary, *strides, batch, gamma, shape.splits)

        def launch(stage: int, programs: int, warps: int, ticket: bool = False, **options: Any) -> _Launch:
            tail = (
                programs, shape.blocks, shape.block, vector, shape.tiles, max(2, triton.next_power_of_2(gamma)),
                4 if shape.splits <= 4 else SPLITS, 64 if shape.shares <= 64 else SHARES, self.form, block_rule, self.truncates, stage, ticket,
            )  # fmt: skip
            return _Launch(source.verify_kernel, batch * programs, (*integers, *tail), {"num_warps": warps, **options})

        if fused:
            programs = shape.shares
            # Two blocks of a request's programs must fit a multiprocessor, or not all of them may be resident.
            options = {"maxnreg": 128} if shape.warps >= 8 and not INTERPRETED else {}
            return [launch(ALL, programs, shape.warps, batch * programs > 2 * multiprocessors, **options)]
        owners = gamma * shape.splits
        launches = [launch(STATISTICS, owners, shape.warps)]
        if block_rule and self.form != ONE_HOT and gamma > 1:
            launches.append(launch(SURPLUS, owners, shape.warps))
        return [*launches, launch(DRAW, shape.shares, 8 if shape.tiles == 4 else 4)]

    def _choose_launches(
        self, batch: int, vocabulary: int, logits: Tensor, given: Tensor, rule: str, schedule: str, multiprocessors: int
    ) -> list[_Launch]:
        rows = self.gamma + 1
        tiles = -(-vocabulary // 1024)
        splits = max(1, min(SPLITS if rows > 1 else SHARES, tiles, 4 * multiprocessors // (batch * rows)))
        wide = 4 if tiles / splits >= 8 else 2 if tiles / splits >= 2 else 1
        self.keys = torch.empty(batch * rows * splits, dtype=torch.int64, device=logits.device)
        self.counts = torch.zeros(batch, dtype=torch.int32, device=logits.device)
        integers = (vocabulary, logits.stride(0), logits.stride(1), batch, self.gamma, splits)
        tail = (wide, max(2, triton.next_power_of_2(rows)), max(4, triton.next_power_of_2(splits)), self.truncates)
        return [
            _Launch(
                source.choose_kernel, batch * rows * splits, (*integers, *tail), {"num_warps": 8 if wide == 4 else 4}
            )
        ]


@dataclass(frozen=True)
class _Shape:
    """How the work of one block is divided."""

    splits: int  # of each row, for the statistics
    blocks: int  # a program reads this many blocks of its split
    block: int
    shares: int  # programs that race for the next token of a request
    tiles: int  # 1024-token tiles a program races at once
    warps: int


def _shape(batch: int, gamma: int, vocabulary: int, multiprocessors: int, fused: bool) -> _Shape:
    """A function of shapes and the device alone, never of data; every choice gives the same tokens."""
    tiles = -(-vocabulary // 1024)
    if fused:
        # The programs of a request wait for each other, so they must fit the device together, two a multiprocessor.
        wanted = max(1, min(2 * multiprocessors // (batch * gamma), min(SHARES, 2 * multiprocessors) // gamma))
    else:
        wanted = max(1, -(-8 * multiprocessors // (batch * gamma)))
    entries = -(-vocabulary // min(wanted, SPLITS))
    block = 1024 if entries <= 1024 else 2048 if entries <= 2048 or not fused or vocabulary % 16 else 4096
    if INTERPRETED:  # a block costs what an operation costs there, whatever its length
        block = min(16384, triton.next_power_of_2(max(entries, 16)))
    blocks = -(-entries // block)
    splits = -(-vocabulary // (block * blocks))
    shares = (
        max(gamma * splits, min(tiles, 2 * multiprocessors // batch, SHARES))
        if fused
        else max(1, min(tiles, 8 * multiprocessors // batch, SHARES))
    )
    if INTERPRETED and not fused:
        shares = 1
    each = tiles / shares
    wide = 4 if each >= 8 else 2 if each >= 2 else 1
    if INTERPRETED:
        wide = min(16, triton.next_power_of_2(tiles))
    warps = 8 if block >= 4096 or (fused and wide == 4) or (vocabulary % 16 and block > 1024) else 4
    return _Shape(splits, blocks, block, shares, wide, warps)


def _prefers_fused(batch: int, gamma: int, vocabulary: int, multiprocessors: int) -> bool:
    """One launch or several. Measured on an H200: waiting for each other pays while every row has a program of its own and no program has
    more than 32 tiles to race; and it is safe only where nothing else can keep the programs of a request from starting."""
    shares = max(1, 2 * multiprocessors // batch)
    return (
        not INTERPRETED
        and multiprocessors > BARRIER_SMS
        and batch * gamma <= 2 * multiprocessors
        and vocabulary <= 32 * 1024 * shares
    )


@dataclass
class _Launch:
    """One kernel with its integers. The first call goes through Triton's dispatch, later ones to the compiled kernel at once."""

    kernel: Any
    programs: int
    integers: tuple
    options: dict[str, Any]
    run: Callable | None = None

    def __call__(self, pointers: tuple[Tensor, ...]) -> None:
        if self.run is not None:
            self.run(*pointers, *self.integers)
            return
        if INTERPRETED:
            with np.errstate(all="ignore"):  # the interpreter computes in numpy, which warns of log2(0)
                self.kernel[(self.programs,)](*pointers, *self.integers, **self.options)
            return
        compiled = self.kernel[(self.programs,)](*pointers, *self.integers, **self.options)
        self.run = compiled[(self.programs, 1, 1)]


def row_thresholds(logits: Tensor, settings: Settings, out: Tensor | None = None) -> Tensor:
    """top-k, top-p and min-p as one threshold a row, in raw logits: [B, R, V] -> [B, R] float32. An entry stays where x >= threshold."""
    batch, rows, vocabulary = logits.shape
    out = torch.empty(batch, rows, dtype=torch.float32, device=logits.device) if out is None else out
    block = min(8192 if INTERPRETED else 4096, triton.next_power_of_2(vocabulary))
    with np.errstate(all="ignore"):
        threshold_source.threshold_kernel[(batch * rows,)](
            logits, settings.temperature, settings.top_k, settings.top_p, settings.min_p, out, vocabulary, logits.stride(0), logits.stride(1),
            rows, BITS[logits.dtype], block, *settings.cuts, num_warps=16,
        )  # fmt: skip
    return out


def accept_only(target_log_p: Tensor, draft_log_p: Tensor, ids: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Acceptance from ready log-probabilities [B, γ, V] in one launch: mask [B, γ] and first rejection [B]."""
    batch, gamma, vocabulary = target_log_p.shape
    accepted = torch.empty(batch, gamma, dtype=torch.bool, device=ids.device)
    first = torch.empty(batch, dtype=torch.int32, device=ids.device)
    source.accept_kernel[(batch,)](
        target_log_p, draft_log_p, ids, uniforms, accepted, first, gamma, vocabulary, max(2, triton.next_power_of_2(gamma)), num_warps=1
    )  # fmt: skip
    return accepted, first
