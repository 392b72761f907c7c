"""What every verifier takes and gives.

One call judges a block of each request: (logits, draft, settings, rule, seed, position) -> Verdict. Tensors stay where the logits are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flashspec.sampling import SamplingParams

UNUSABLE_ROW = 1  # status bit: NaN, +inf, or nothing but -inf in a row of drafted tokens or in that of the next token
BAD_ID = 2  # status bit: a drafted id outside 0..V-1, which is taken as rejected


@dataclass(frozen=True)
class Draft:
    """Drafted tokens and the distribution they were drawn from, in one of four forms.

    ids [B, γ] int64. q [B, γ, V] float32: the distribution itself. logits [B, γ, V]: raw logits, q being their warp with the request's
    settings; lse [B, γ] float32 beside them: their log-sum-exp at the request's temperature, without truncation, natural logarithm.
    Neither: every q is one-hot. num_draft [B] int32: how many of the γ tokens count, all of them if None.
    """

    ids: Tensor
    q: Tensor | None = None
    logits: Tensor | None = None
    lse: Tensor | None = None
    num_draft: Tensor | None = None


@dataclass(frozen=True)
class Settings:
    """Sampling settings of a batch: one for all requests or one for each; the tensors are made once and kept."""

    requests: tuple[SamplingParams, ...]
    batch: int
    device: torch.device

    @classmethod
    def of(cls, params: SamplingParams | Sequence[SamplingParams], batch: int, device: torch.device | str) -> Settings:
        requests = (params,) if isinstance(params, SamplingParams) else tuple(params)
        if len(requests) not in (1, batch):
            raise ValueError(f"{len(requests)} settings for {batch} requests; give one for all or one for each.")
        return cls(requests, batch, torch.device(device))

    def request(self, b: int) -> SamplingParams:
        return self.requests[b if len(self.requests) > 1 else 0]

    @property
    def greedy(self) -> bool:
        """Whether every request is."""
        return all(request.temperature == 0 for request in self.requests)

    @cached_property
    def temperature(self) -> Tensor:
        return self._column([r.temperature for r in self.requests], torch.float32)

    @cached_property
    def top_k(self) -> Tensor:
        return self._column([r.top_k for r in self.requests], torch.int32)

    @cached_property
    def top_p(self) -> Tensor:
        return self._column([r.top_p for r in self.requests], torch.float32)

    @cached_property
    def min_p(self) -> Tensor:
        return self._column([r.min_p for r in self.requests], torch.float32)

    @cached_property
    def cuts(self) -> tuple[bool, bool, bool]:
        """Whether any request uses top-k, top-p, min-p."""
        return (
            any(r.top_k > 0 for r in self.requests),
            any(r.top_p < 1 for r in self.requests),
            any(r.min_p > 0 for r in self.requests),
        )

    def _column(self, values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device).expand(self.batch).contiguous()


class Grounds(NamedTuple):
    """On what grounds a block was judged: what the page explains and nothing that decoding needs."""

    p: Tensor  # [B, γ+1, V] float32, the target's distributions
    q: Tensor  # [B, γ, V] float32, the drafter's, dense
    thresholds: Tensor  # [B, γ] float32, position i passes when uniforms <= thresholds
    uniforms: Tensor  # [B, γ] float32; both are [B, 0] for the coupled rule, which draws none
    weights: Tensor  # [B, V] float32, unnormalised law of the next token


class Verdict(NamedTuple):
    """What was decided. tokens [B, γ+1] int64: accepted tokens, the next token, then -1. tau, status [B] int."""

    tokens: Tensor
    tau: Tensor
    status: Tensor
    grounds: Grounds | None = None  # where the backend has them anyway


class Verifier(Protocol):
    """A backend. `name` is what a Round records."""

    name: str

    def verify(
        self, logits: Tensor, draft: Draft, settings: Settings, rule: str, seed: Tensor, position: Tensor
    ) -> Verdict:
        """Judge one drafted block per request.

        logits [B, γ+1, V] of any float type, after penalties, unit stride over V; row i predicts the token behind ids[:, :i], γ may be 0.
        rule "token", "block" or "coupled" (`rules`, formulas and papers there). seed [B] int64; position [B] int64: absolute index of the
        first drafted token.
        """
