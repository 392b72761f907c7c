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
    judge = rules.RULES[rule]
    if judge is None:
        noise = [rng.exponentials(seed, position + i, p.shape[-1], rng.RACE) for i in range(gamma + 1)]
        tau, next_token = coupled(p, ids, torch.stack(noise, 1))
        weights = rules.row(p, tau)
        thresholds = uniforms = p.new_empty(batch, 0)
    else:
        uniforms = rng.uniforms(seed, position, gamma)
        if gamma:
            thresholds = judge.thresholds(p, q, ids)
            tau = judge.accepted(uniforms <= thresholds)
            weights = judge.replacement(p, q, ids, tau)
            # p equal to q up to rounding and still rejected: nothing positive is left, so p itself is drawn from.
            weights = torch.where(weights.amax(-1, keepdim=True) > 0, weights, rules.row(p, tau))
        else:
            tau, weights, thresholds = torch.zeros_like(position), p[:, 0], uniforms
        noise = rng.exponentials(seed, position + tau, p.shape[-1], rng.RACE)
        next_token = rng.race(weights, noise)
    return Verdict(tau, next_token, has_usable_rows(logits), p, thresholds, uniforms, weights)


def coupled(p: Tensor, ids: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The target's own choice at every position, accepted while the drafter made the same.

    p, noise [B, γ+1, V], ids [B, γ] -> tau [B], next token [B].
    """
    choices = rng.race(p, noise)  # [B, γ+1]
    tau = rules.leading(rules.matches(choices, ids))
    return tau, rules.pick(choices, tau[:, None])[:, 0]
