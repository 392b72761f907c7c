"""The three exact rules as formulas, written once for torch tensors and for numpy arrays of Fractions.

The engine runs these functions on float tensors; the exactness checks run the same functions on rational numbers and
compare laws with `==`. Shapes: p [B, γ+1, V], q [B, γ, V], ids [B, γ]; q is dense (one-hot rows for one-hot drafts).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Array = Any  # torch.Tensor of floats, or numpy.ndarray of dtype object holding Fractions


@dataclass(frozen=True)
class Rule:
    """How a block is judged by independent uniforms.

    thresholds(p, q, ids) -> h [B, γ]: position i passes when u_i <= h_i.
    accepted(passes [B, γ] bool) -> tau [B].
    replacement(p, q, ids, tau [B]) -> [B, V]: weights ∝ the law of the next token (p itself where tau = γ).
    """

    thresholds: Callable[[Array, Array, Array], Array]
    accepted: Callable[[Array], Array]
    replacement: Callable[[Array, Array, Array, Array], Array]


# ---------------------------------------------------------------- token rule: Leviathan et al. 2023, Chen et al. 2023


def ratios(p: Array, q: Array, ids: Array) -> Array:
    """r_i = p(x_i) / q(x_i): [B, γ]; 0 where q(x_i) = 0, a token that cannot have been drafted."""
    p_x, q_x = pick(p[:, :-1], ids), pick(q, ids)
    return (q_x > 0) * p_x / (q_x + (q_x == 0))


def leading(passes: Array) -> Array:
    """Length of the run of passes at the start: [B, γ] bool -> [B]."""
    return passes.cumprod(-1).sum(-1)


def residual(p: Array, q: Array, ids: Array, tau: Array) -> Array:
    """max(p - q, 0) at position tau; p where the whole block was accepted."""
    return (row(p, tau) - _drafted_row(q, tau)).clip(0)


# ------------------------------------------------------------- block rule: Sun et al. 2025, arXiv 2403.10444, Algorithm 2


def prefix_probabilities(p: Array, q: Array, ids: Array) -> list[Array]:
    """P_0 = 1, P_i = min(1, P_{i-1} r_i): γ+1 arrays [B]."""
    ratio = ratios(p, q, ids)
    chain = [p[:, 0].sum(-1) * 0 + 1]
    for i in range(ratio.shape[1]):
        chain.append((chain[-1] * ratio[:, i]).clip(None, 1))
    return chain


def block_thresholds(p: Array, q: Array, ids: Array) -> Array:
    """h_i = s_i / (s_i + 1 - P_i) with s_i = Σ_v max(P_i p - q, 0) behind x_i; h_γ = P_γ; 0/0 is 1."""
    chain = prefix_probabilities(p, q, ids)
    gamma = ids.shape[1]
    h = []
    for i in range(1, gamma):
        s = (chain[i][:, None] * p[:, i] - q[:, i]).clip(0).sum(-1)
        rest = s + 1 - chain[i]
        h.append((s + (rest == 0)) / (rest + (rest == 0)))
    return stack([*h, chain[gamma]])


def last(passes: Array) -> Array:
    """Index (from 1) of the last pass, 0 if none: a failure does not end the scan. [B, γ] bool -> [B]."""
    tau = passes.sum(-1) * 0
    for i in range(passes.shape[1]):
        tau = passes[:, i] * (i + 1) + ~passes[:, i] * tau
    return tau


def block_residual(p: Array, q: Array, ids: Array, tau: Array) -> Array:
    """max(P_tau p - q, 0) at position tau; ∝ p where the whole block was accepted."""
    chain = pick(stack(prefix_probabilities(p, q, ids)), tau[:, None])
    return (chain * row(p, tau) - _drafted_row(q, tau)).clip(0)


# --------------------------------------------------------------------- coupled rule: Daliri, Musco, Suresh, arXiv 2408.07978


def matches(choices: Array, ids: Array) -> Array:
    """Whether the drafter proposed what the target chooses: [B, γ+1], [B, γ] -> [B, γ] bool. tau = leading(matches)."""
    return choices[:, : ids.shape[1]] == ids


TOKEN = Rule(ratios, leading, residual)
BLOCK = Rule(block_thresholds, last, block_residual)
RULES: dict[str, Rule | None] = {
    "token": TOKEN,
    "block": BLOCK,
    "coupled": None,
}  # None: judged by choices, not by uniforms


# ------------------------------------------------------------------------------------------------ indexing both kinds of array


def pick(rows: Array, ids: Array) -> Array:
    """rows[..., ids]: [B, ..., V], [B, ...] -> [B, ...]; a row [B, V] takes ids [B, n]."""
    at = ids if rows.ndim == ids.ndim else ids[..., None]
    taken = rows.gather(-1, at) if isinstance(rows, torch.Tensor) else np.take_along_axis(rows, at, -1)
    return taken if rows.ndim == ids.ndim else taken[..., 0]


def row(rows: Array, index: Array) -> Array:
    """rows[b, index[b]]: [B, n, V], [B] -> [B, V]."""
    batch = torch.arange(len(index), device=index.device) if isinstance(rows, torch.Tensor) else np.arange(len(index))
    return rows[batch, index]


def stack(columns: list[Array]) -> Array:
    """γ arrays [B] -> [B, γ]."""
    return torch.stack(columns, -1) if isinstance(columns[0], torch.Tensor) else np.stack(columns, -1)


def _drafted_row(q: Array, tau: Array) -> Array:
    """q at position tau, zeros where nothing was drafted there: [B, γ, V], [B] -> [B, V]."""
    gamma = q.shape[1]
    return row(q, tau.clip(None, gamma - 1)) * (tau < gamma)[:, None]
