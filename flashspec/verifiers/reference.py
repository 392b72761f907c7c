"""Verification in PyTorch, on whatever device the logits are, without reading anything back to the host.

One call judges a block: raw (already penalised) target logits and the draft in, tau and the next token out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashspec import rng
from flashspec.sampling import SamplingParams, has_usable_rows, warp
from flashspec.verifiers import rules

BACKEND = "torch"


class Verdict(NamedTuple):
    """What was decided, and on what grounds. All tensors stay on the device of the logits."""

    tau: Tensor  # [B] int64, drafted tokens accepted
    next_token: Tensor  # [B] int64, replacement (tau < γ) or bonus (tau = γ)
    usable: Tensor  # [B] bool, False where a target row is NaN, +inf or all -inf: tau and next_token mean nothing
    p: Tensor  # [B, γ+1, V] float32, the target's distributions
    thresholds: Tensor  # [B, γ] float32, position i passes when uniforms <= thresholds
    uniforms: Tensor  # [B, γ] float32; both are [B, 0] for the coupled rule, which draws none
    weights: Tensor  # [B, V] float32, unnormalised law of the next token


def verify(
    logits: Tensor,
    ids: Tensor,
    q: Tensor,
    params: SamplingParams,
    rule: str,
    seed: Tensor,
    position: Tensor,
) -> Verdict:
    """Judge one drafted block per request.

    logits   [B, γ+1, V] any float type, target logits after penalties, row i predicts the token behind ids[:, :i]
    ids      [B, γ] int64, drafted tokens; γ may be 0
    q        [B, γ, V] float32, the distribution each token was drawn from (one-hot rows for one-hot drafts)
    rule     "token", "block" or "coupled" (`rules`, formulas and papers there)
    seed     [B] int64;  position [B] int64: absolute index of the first drafted token
    """
    p = warp(logits, params)
    batch, gamma = ids.shape
    if rule == "coupled":
        tau, next_token, weights = _coupled(p, ids, seed, position)
        thresholds = uniforms = p.new_empty(batch, 0)
    else:
        chosen = rules.TOKEN if rule == "token" else rules.BLOCK
        uniforms = rng.uniforms(seed, position, gamma)
        if gamma:
            thresholds = chosen.thresholds(p, q, ids)
            tau = chosen.accepted(uniforms <= thresholds)
            weights = chosen.replacement(p, q, ids, tau)
            # p equal to q up to rounding and still rejected: nothing positive is left, so p itself is drawn from.
            weights = torch.where(weights.amax(-1, keepdim=True) > 0, weights, rules.row(p, tau))
        else:
            tau, weights, thresholds = torch.zeros_like(position), p[:, 0], uniforms
        noise = rng.exponentials(seed, position + tau, p.shape[-1], rng.RACE)
        next_token = rng.race(weights, noise)
    return Verdict(tau, next_token, has_usable_rows(logits), p, thresholds, uniforms, weights)


def _coupled(p: Tensor, ids: Tensor, seed: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The target's own choice at every position of the block, accepted while the drafter made the same."""
    choices = torch.stack(
        [
            rng.race(p[:, i], rng.exponentials(seed, position + i, p.shape[-1], rng.RACE))
            for i in range(p.shape[1])
        ],
        -1,
    )  # [B, γ+1]
    tau = rules.leading(rules.matches(choices, ids))
    return tau, rules.pick(choices, tau[:, None])[:, 0], rules.row(p, tau)
