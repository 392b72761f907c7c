"""A Llama forward on the CPU in one call, compiled by Numba: int8 rows, float32 activations, a static cache.

Through PyTorch the same forward is some twenty-five calls a layer, and for a small model they take longer than its products. Here a layer
is two norms, four products and attention, in compiled loops over both cores.

A product takes four rows of a block at a time, also where there are fewer: the weights are read once for the four, so that a block of
four tokens costs little more than one, and a row goes through the same instructions whatever stands beside it, so that its logits are
the same bits in every block.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numba import config as numba_config
from numba import njit, prange, set_num_threads
from torch import Tensor

from flashspec.models.lean import NUMBA, StaticModel, head_width, joined, turns
from flashspec.models.packing import quantise

ROWS = 4  # of a block that a product takes at once
_TILE = 32  # outputs that a thread takes at once
_MATH = {"reassoc", "contract", "nsz"}  # sums in lanes, fused multiply-adds; NaN and infinity stay what they are
_one_at_a_time = threading.Lock()  # Numba's own thread pool, used where there is no OpenMP, is not safe for threads

f32 = np.float32
Array = np.ndarray


@dataclass(frozen=True)
class CompiledLlama:
    """Weights of a Llama-form model, shared read-only by any number of `CompiledModel`s. Products are int8 rows and a scale for each."""

    heads: int
    groups: int
    epsilon: np.float32
    vocabulary: int
    embedding: Tensor  # [V, d]
    qkv: tuple[Array, Array]  # [layers, (heads + 2 groups) · width, d], [layers, …]
    out: tuple[Array, Array]  # [layers, d, heads · width]
    gate_up: tuple[Array, Array]  # [layers, 2 m, d]: gate and up by turns, so that memory is read in order
    down: tuple[Array, Array]  # [layers, d, m]
    norms: Array  # [layers, 2, d]: before attention, before the feed-forward part
    norm: Array  # [d]
    head: tuple[Array, Array]  # [V, d], [V]
    turns: Array  # [context, width / 2, 2]: cosine and sine of RoPE
    layout: str = NUMBA

    @classmethod
    def of(cls, model: Any, layers: int | None = None) -> Self:
        """Lay out a transformers model, or its first `layers` layers."""
        config, base = model.config.get_text_config(), model.model
        heads, groups, width = config.num_attention_heads, config.num_key_value_heads, head_width(config)
        parts = [joined(layer, heads, groups, width) for layer in base.layers[:layers]]
        qkv, out, gate_up, down, *norms = zip(*parts, strict=True)
        by_turns = [w.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) for w in gate_up]
        return cls(
            heads, groups, f32(config.rms_norm_eps), config.vocab_size, base.embed_tokens.weight.float(),
            _stacked(qkv), _stacked(out), _stacked(by_turns), _stacked(down),
            torch.stack([torch.stack(pair) for pair in zip(*norms, strict=True)]).float().numpy(), base.norm.weight.float().numpy(),
            _rows(model.get_output_embeddings().weight), torch.view_as_real(turns(base.rotary_emb, config.max_position_embeddings)).numpy(),
        )  # fmt: skip

    def first(self, count: int) -> Self:
        qkv, out, gate_up, down = ((w[:count], s[:count]) for w, s in (self.qkv, self.out, self.gate_up, self.down))
        return replace(self, qkv=qkv, out=out, gate_up=gate_up, down=down, norms=self.norms[:count])

    def cached(self, name: str) -> CompiledModel:
        return CompiledModel(self, name)


class CompiledModel(StaticModel):
    """A `LanguageModel` on shared weights."""

    def __init__(self, weights: CompiledLlama, name: str) -> None:
        w = self.weights = weights
        super().__init__(name, w.vocabulary, len(w.turns), len(w.norms), w.groups, 2 * w.turns.shape[1])

    def _forward(self, chunk: list[int], keep: int) -> Tensor:
        w, start = self.weights, len(self.tokens)
        self._reserve(start + len(chunk))
        x = torch.nn.functional.pad(w.embedding[torch.tensor(chunk)], (0, 0, 0, -len(chunk) % ROWS)).numpy()
        with _one_at_a_time:
            set_num_threads(min(torch.get_num_threads(), numba_config.NUMBA_NUM_THREADS))
            logits = _run(
                x, len(chunk), start, keep, self._cache.numpy(), w.heads, w.epsilon, *w.qkv, *w.out, *w.gate_up, *w.down,
                w.norms, w.norm, *w.head, w.turns,
            )  # fmt: skip
        return torch.from_numpy(logits)[None]


def _stacked(weights: Any) -> tuple[Array, Array]:
    """Products of all layers: [layers, out, in] int8 and [layers, out] float32."""
    rows, scales = zip(*map(_rows, weights), strict=True)
    return np.stack(rows), np.stack(scales)


def _rows(weight: Tensor) -> tuple[Array, Array]:
    rows, scale = quantise(weight)
    return rows.numpy(), scale.numpy()


# ------------------------------------------------------------------------------------------------------------- compiled loops


@njit(nogil=True, cache=True, fastmath=_MATH)
def _run(
    x: Array, n: int, start: int, keep: int, cache: Array, heads: int, epsilon: np.float32, qkv: Array, qkv_scale: Array,
    out: Array, out_scale: Array, gate_up: Array, gate_up_scale: Array, down: Array, down_scale: Array,
    norms: Array, norm: Array, head: Array, head_scale: Array, turns: Array,
) -> Array:  # fmt: skip
    """Read n tokens, x [n, d] padded to a multiple of ROWS, behind `start` tokens of the cache; logits [keep, V] of the last ones."""
    padded, d = x.shape
    normed, added = np.empty_like(x), np.empty_like(x)
    projected = np.empty((padded, qkv.shape[1]), f32)
    attended = np.zeros((padded, out.shape[2]), f32)
    hidden = np.empty((padded, down.shape[2]), f32)
    for i in range(len(norms)):
        _rms_norm(x, norms[i, 0], epsilon, normed)
        _product(normed, qkv[i], qkv_scale[i], projected)
        _turn_and_store(projected, n, start, heads, turns, cache[i])
        _attend(projected, n, start, heads, cache[i], attended)
        _product(attended, out[i], out_scale[i], added)
        x += added
        _rms_norm(x, norms[i, 1], epsilon, normed)
        _gated_product(normed, gate_up[i], gate_up_scale[i], hidden)
        _product(hidden, down[i], down_scale[i], added)
        x += added
    kept = np.zeros(((keep + ROWS - 1) // ROWS * ROWS, d), f32)
    _rms_norm(x[n - keep : n], norm, epsilon, kept)
    logits = np.empty((len(kept), len(head)), f32)
    _product(kept, head, head_scale, logits)
    return logits[:keep]


@njit(cache=True, fastmath=_MATH)
def _rms_norm(x: Array, weight: Array, epsilon: np.float32, y: Array) -> None:
    """y = x / √(mean x² + ε) · weight, by row."""
    for r in range(len(x)):
        square = f32(0)
        for k in range(len(weight)):
            square += x[r, k] * x[r, k]
        scale = f32(1) / np.sqrt(square / f32(len(weight)) + epsilon)
        for k in range(len(weight)):
            y[r, k] = x[r, k] * scale * weight[k]


@njit(cache=True, fastmath=_MATH, inline="always")
def _four(row: Array, scale: np.float32, a: Array, b: Array, c: Array, d: Array) -> tuple[np.float32, ...]:
    """Products of one row of weights with four rows of activations. Written out, as sums in an array would leave the registers."""
    at, bt, ct, dt = f32(0), f32(0), f32(0), f32(0)
    for k in range(len(row)):
        w = f32(row[k])
        at += w * a[k]
        bt += w * b[k]
        ct += w * c[k]
        dt += w * d[k]
    return at * scale, bt * scale, ct * scale, dt * scale


@njit(parallel=True, cache=True, fastmath=_MATH)
def _product(x: Array, weight: Array, scale: Array, y: Array) -> None:
    """y [n, out] = x [n, in] · (weight [out, in] · scale [out])ᵀ; n is a multiple of ROWS."""
    for tile in prange((len(weight) + _TILE - 1) // _TILE):
        first, last = tile * _TILE, min((tile + 1) * _TILE, len(weight))
        for r in range(0, len(x), ROWS):
            for o in range(first, last):
                found = _four(weight[o], scale[o], x[r], x[r + 1], x[r + 2], x[r + 3])
                for j in range(ROWS):
                    y[r + j, o] = found[j]


@njit(parallel=True, cache=True, fastmath=_MATH)
def _gated_product(x: Array, weight: Array, scale: Array, y: Array) -> None:
    """y [n, m] = SiLU(gate) · up, which are the even and the odd rows of weight [2 m, in]."""
    size = len(weight) // 2
    for tile in prange((size + _TILE - 1) // _TILE):
        first, last = tile * _TILE, min((tile + 1) * _TILE, size)
        for r in range(0, len(x), ROWS):
            for o in range(first, last):
                gate = _four(weight[2 * o], scale[2 * o], x[r], x[r + 1], x[r + 2], x[r + 3])
                up = _four(weight[2 * o + 1], scale[2 * o + 1], x[r], x[r + 1], x[r + 2], x[r + 3])
                for j in range(ROWS):
                    y[r + j, o] = gate[j] / (f32(1) + np.exp(-gate[j])) * up[j]


@njit(cache=True)
def _turn_and_store(projected: Array, n: int, start: int, heads: int, turns: Array, cache: Array) -> None:
    """RoPE on queries and keys, neighbours being a pair, in place; keys and values to their places in the cache."""
    groups, width = cache.shape[1], cache.shape[3]
    for r in range(n):
        for h in range(heads + groups):
            for i in range(width // 2):
                at = h * width + 2 * i
                even, odd = projected[r, at], projected[r, at + 1]
                cosine, sine = turns[start + r, i]
                projected[r, at], projected[r, at + 1] = even * cosine - odd * sine, even * sine + odd * cosine
        for g in range(groups):
            key, value = (heads + g) * width, (heads + groups + g) * width
            cache[0, g, start + r] = projected[r, key : key + width]
            cache[1, g, start + r] = projected[r, value : value + width]


@njit(parallel=True, cache=True, fastmath=_MATH)
def _attend(projected: Array, n: int, start: int, heads: int, cache: Array, y: Array) -> None:
    """Causal attention of every row and head over the cache: y [n, heads · width]."""
    groups, width = cache.shape[1], cache.shape[3]
    root = f32(1) / np.sqrt(f32(width))
    for task in prange(n * heads):
        r, h = task // heads, task % heads
        keys, values = cache[0, h // (heads // groups)], cache[1, h // (heads // groups)]
        query, mean = projected[r, h * width : (h + 1) * width], y[r, h * width : (h + 1) * width]
        length = start + r + 1
        scores = np.empty(length, f32)
        for t in range(length):
            score = f32(0)
            for k in range(width):
                score += query[k] * keys[t, k]
            scores[t] = score * root
        highest = scores.max()
        total = f32(0)
        mean[:] = f32(0)
        for t in range(length):
            weight = np.exp(scores[t] - highest)
            total += weight
            for k in range(width):
                mean[k] += weight * values[t, k]
        for k in range(width):
            mean[k] /= total
