"""Verification on a CPU in loops that Numba compiles: the same verdicts as the reference's, in one call for a request.

Between two readings of a large model nothing is left in the processor's caches, so that the reference's fifty small steps cost more than
their arithmetic. The warp is the engine's own, in PyTorch; what follows it is here. A verdict has no grounds; the reference explains.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from flashspec import rng
from flashspec.loops import first_largest, highest, noise, uniform
from flashspec.verifiers.base import BAD_ID, UNUSABLE_ROW, Draft, Settings, Verdict
from flashspec.verifiers.reference import ReferenceVerifier, warped

f32 = np.float32
Array = np.ndarray
_MATH = {"reassoc", "contract", "nsz"}


class CompiledVerifier:
    """See `base.Verifier` for shapes. Logits elsewhere than on the CPU go to the reference, and so do rules that are not known here."""

    name = "numba"

    def verify(
        self, logits: Tensor, draft: Draft, settings: Settings, rule: str, seed: Tensor, position: Tensor
    ) -> Verdict:
        if logits.device.type != "cpu" or rule not in ("token", "block", "coupled"):
            return ReferenceVerifier().verify(logits, draft, settings, rule, seed, position)
        batch, rows, _ = logits.shape
        p = logits if settings.greedy else warped(logits, settings)
        q = warped(draft.logits, settings) if draft.q is None and draft.logits is not None else draft.q
        tokens = np.full((batch, rows), -1)
        tau, status = np.zeros(batch, np.int64), np.zeros(batch, np.int64)
        ids = draft.ids.numpy()
        for b in range(batch):
            n = rows - 1 if draft.num_draft is None else int(draft.num_draft[b])
            law, some = _rows(p[b]), ids[b, :n]
            stated = _rows(q[b]) if q is not None else law[:0]
            if settings.greedy:
                tau[b], next_token = _greedy(law, stated, some, rule == "coupled")
            elif rule == "coupled":
                tau[b], next_token = _coupled(law, some, int(seed[b]), int(position[b]))
            else:
                tau[b], next_token = _judge(law, stated, some, rule == "block", int(seed[b]), int(position[b]))
            status[b] = _status(_rows(logits[b]), some, tau[b])
            tokens[b, : tau[b]], tokens[b, tau[b]] = ids[b, : tau[b]], next_token
        return Verdict(*map(torch.from_numpy, (tokens, tau, status)))


def _rows(rows: Tensor) -> Array:
    return rows.float().contiguous().numpy()


# ------------------------------------------------------------------------------------------------------------- compiled loops
# For one request: p [γ+1, V], q [γ, V] or [0, V] where every drafted token was certain, ids [n] the n <= γ that count. A rule returns
# tau and the next token.


@njit(nogil=True, cache=True)
def _judge(p: Array, q: Array, ids: Array, block: bool, key: int, place: int) -> tuple[int, int]:
    """Token and block rule: `rules.ratios`, `leading`, `residual`; `block_thresholds`, `last`, `block_residual`."""
    n, tau, chain, kept = len(ids), 0, 1.0, 1.0
    for i in range(n):
        id = ids[i]
        ratio: Any = 0.0
        if 0 <= id < p.shape[1]:
            q_x = q[i, id] if len(q) else f32(1)
            ratio = p[i, id] / q_x if q_x > 0 else f32(0)
        threshold = ratio
        if block:
            chain = min(1.0, chain * ratio)
            threshold = chain
            if i + 1 < n:
                excess = _excess(chain, p[i + 1], q[i + 1 : i + 2], ids[i + 1])
                rest = excess + 1 - chain
                threshold = excess / rest if rest > 0 else 1.0
        if (block or tau == i) and uniform(key, place, i) <= threshold:
            tau, kept = i + 1, chain
    weights = p[tau]
    if tau < n:
        weights = _residual(kept, p[tau], q[tau : tau + 1], ids[tau])
    return tau, _race(weights, noise(key, place + tau, rng.RACE, p.shape[1]))


@njit(nogil=True, cache=True)
def _coupled(p: Array, ids: Array, key: int, place: int) -> tuple[int, int]:
    """The coupled rule: the target's own choice at every position, as long as the drafter made the same."""
    tau = 0
    choice = _race(p[0], noise(key, place, rng.RACE, p.shape[1]))
    while tau < len(ids) and choice == ids[tau]:
        tau += 1
        choice = _race(p[tau], noise(key, place + tau, rng.RACE, p.shape[1]))
    return tau, choice


@njit(nogil=True, cache=True)
def _greedy(logits: Array, q: Array, ids: Array, coupled: bool) -> tuple[int, int]:
    """All rules at temperature 0: a drafted token passes as long as it is the target's choice and had a chance."""
    tau = 0
    choice = first_largest(logits[0])
    while tau < len(ids) and choice == ids[tau] and (coupled or not len(q) or q[tau, choice] > 0):
        tau += 1
        choice = first_largest(logits[tau])
    return tau, choice


@njit(nogil=True, cache=True)
def _status(logits: Array, ids: Array, tau: int) -> int:
    """BAD_ID for an id outside the vocabulary; UNUSABLE_ROW where a row by which a drafted token was judged, or the next one drawn, is NaN,
    +inf or all -inf."""
    status = 0
    for id in ids:
        if not 0 <= id < logits.shape[1]:
            status |= BAD_ID
    for r in range(max(len(ids), tau + 1)):
        if not -np.inf < highest(logits[r]) < np.inf:
            status |= UNUSABLE_ROW
    return status


@njit(cache=True, fastmath=_MATH)
def _excess(chain: float, p: Array, q: Array, id: int) -> float:
    """Σ_v max(chain · p − q, 0); q [1, V], or [0, V] for one-hot at id."""
    total, scale = 0.0, f32(chain)
    if not len(q):
        for v in range(len(p)):
            total += scale * p[v]
        return total - scale * p[id] if 0 <= id < len(p) else total
    for v in range(len(p)):
        total += max(scale * p[v] - q[0, v], f32(0))
    return total


@njit(cache=True, fastmath=_MATH)
def _residual(chain: float, p: Array, q: Array, id: int) -> Array:
    """max(chain · p − q, 0) [V]; p itself where nothing of that is left, which is rounding."""
    weights, scale, left = np.empty_like(p), f32(chain), False
    for v in range(len(p)):
        weights[v] = max(scale * p[v] - (q[0, v] if len(q) else f32(0)), f32(0))
    if not len(q) and 0 <= id < len(p):
        weights[id] = 0
    for v in range(len(p)):
        left |= weights[v] > 0
    return weights if left else p


@njit(cache=True)
def _race(weights: Array, noise: Array) -> int:
    """`rng.race`; overwrites the noise."""
    for v in range(len(weights)):
        noise[v] = weights[v] / noise[v]
    return first_largest(noise)
