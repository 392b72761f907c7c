"""A Llama forward on the CPU in one call, compiled by Numba: int8 rows, int16 activations, a static cache.

Through PyTorch the same forward is some twenty-five calls a layer, and for a small model they take longer than its products. Here a layer
is two norms, four products and attention, in compiled loops over both cores.

A product takes four rows of a block at a time, or one alone: the weights are read once for the four, so that a block of four tokens costs
little more than one. Before a product every row is rounded to whole numbers of up to fifteen bits and a scale, much finer than the weights'
seven; sums of integers are exact, and no sum can overflow. So a row's logits are the same bits whatever stands beside it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numba import config as numba_config
from numba import njit, prange, set_num_threads
from torch import Tensor

from flashspec.lanes import ROWS, WIDTH, add_rows, dot, dots, exp
from flashspec.models.lean import NUMBA, StaticModel, head_width, joined, turns
from flashspec.models.packing import quantise

_TILE = 32  # outputs that a thread takes at once
_QUERIES = 4  # heads of rows that are attended to together
_KEYS = 64  # positions whose keys lie together, number by number, so that their scores are computed in lanes
_MATH = {"reassoc", "contract", "nsz"}  # sums in lanes, fused multiply-adds; NaN and infinity stay what they are
_one_at_a_time = threading.Lock()  # Numba's own thread pool, used where there is no OpenMP, is not safe for threads

f32, i16, i32 = np.float32, np.int16, np.int32
Array = np.ndarray


class Matrix(NamedTuple):
    """A product's weights, those of all layers together where there is a first axis."""

    rows: Array  # [..., out, in] int8, columns filled up with zeros to a multiple of WIDTH
    scale: Array  # [..., out] float32
    most: Any  # [...] float32: the largest activation for which no sum of a row can overflow, at most that of int16


@dataclass(frozen=True)
class CompiledLlama:
    """Weights of a Llama-form model, shared read-only by any number of `CompiledModel`s."""

    heads: int
    groups: int
    epsilon: np.float32
    vocabulary: int
    embedding: Array  # [V, d]
    qkv: Matrix  # [layers, (heads + 2 groups) · width, d]
    out: Matrix  # [layers, d, heads · width]
    gate_up: Matrix  # [layers, 2 m, d]
    down: Matrix  # [layers, d, m]
    norms: Array  # [layers, 2, d]: before attention, before the feed-forward part
    norm: Array  # [d]
    head: Matrix  # [V, d]
    turns: Array  # [context, width / 2, 2]: cosine and sine of RoPE
    layout: str = NUMBA

    @classmethod
    def of(cls, model: Any, layers: int | None = None) -> Self:
        """Lay out a transformers model, or its first `layers` layers."""
        config, base = model.config.get_text_config(), model.model
        heads, groups, width = config.num_attention_heads, config.num_key_value_heads, head_width(config)
        parts = [joined(layer, heads, groups, width) for layer in base.layers[:layers]]
        qkv, out, gate_up, down, *norms = zip(*parts, strict=True)
        return cls(
            heads, groups, f32(config.rms_norm_eps), config.vocab_size, base.embed_tokens.weight.float().numpy(),
            _stacked(qkv), _stacked(out), _stacked(gate_up), _stacked(down),
            torch.stack([torch.stack(pair) for pair in zip(*norms, strict=True)]).float().numpy(), base.norm.weight.float().numpy(),
            _matrix(model.get_output_embeddings().weight), torch.view_as_real(turns(base.rotary_emb, config.max_position_embeddings)).numpy(),
        )  # fmt: skip

    def first(self, count: int) -> Self:
        qkv, out, gate_up, down = (
            Matrix(*(part[:count] for part in product)) for product in (self.qkv, self.out, self.gate_up, self.down)
        )
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
        x = np.zeros((_padded(len(chunk)), w.embedding.shape[1]), f32)
        x[: len(chunk)] = w.embedding[chunk]
        with _one_at_a_time:
            set_num_threads(min(torch.get_num_threads(), numba_config.NUMBA_NUM_THREADS))
            logits = _run(
                x, len(chunk), start, keep, self._cache.numpy(), w.heads, w.epsilon, w.qkv, w.out, w.gate_up, w.down,
                w.norms, w.norm, w.head, w.turns,
            )  # fmt: skip
        return torch.from_numpy(logits)[None]


def _stacked(weights: Any) -> Matrix:
    """Products of all layers."""
    return Matrix(*map(np.stack, zip(*map(_matrix, weights), strict=True)))


def _matrix(weight: Tensor) -> Matrix:
    rows, scale = quantise(torch.nn.functional.pad(weight, (0, -weight.shape[1] % WIDTH)))
    heaviest = rows.abs().sum(1, dtype=torch.int64).max()
    return Matrix(rows.numpy(), scale.numpy(), f32(min(2**15 - 1, (2**31 - 1) // max(int(heaviest), 1))))


# ------------------------------------------------------------------------------------------------------------- compiled loops


@njit(cache=True)
def _padded(n: int) -> int:
    """Rows that a product takes for n: one alone, else a multiple of ROWS."""
    return n if n == 1 else (n + ROWS - 1) // ROWS * ROWS


@njit(cache=True)
def _aligned(rows: int, columns: int) -> Array:
    """Zeros, int16, that begin with a line of the processor's cache: of which no vector of a product then lies across two."""
    buffer = np.zeros(rows * columns + 32, i16)
    first = -buffer.ctypes.data % 64 // 2
    return buffer[first : first + rows * columns].reshape(rows, columns)


@njit(nogil=True, cache=True, fastmath=_MATH)
def _run(
    x: Array, n: int, start: int, keep: int, cache: Array, heads: int, epsilon: np.float32, qkv: Matrix, out: Matrix,
    gate_up: Matrix, down: Matrix, norms: Array, norm: Array, head: Matrix, turns: Array,
) -> Array:  # fmt: skip
    """Read n tokens, x [n, d] `_padded`, behind `start` tokens of the cache; logits [keep, V] of the last ones.

    cache [layers, 2, groups, length, width], whose keys lie in blocks of _KEYS positions, each [width, _KEYS].
    """
    padded = len(x)
    projected = np.empty((padded, qkv.rows.shape[1]), f32)
    attended = np.zeros((padded, heads * cache.shape[4]), f32)
    gated, added = np.empty((padded, gate_up.rows.shape[1] // 2), f32), np.empty_like(x)
    scale = np.empty(padded, f32)
    normed, mixed, hidden = (
        _aligned(padded, qkv.rows.shape[2]), _aligned(padded, out.rows.shape[2]), _aligned(padded, down.rows.shape[2]),
    )  # fmt: skip
    groups, length, width = cache.shape[2:]
    for i in range(len(norms)):
        keys, values = cache[i, 0].reshape(groups, length // _KEYS, width, _KEYS), cache[i, 1]
        _rms_norm(x, norms[i, 0], epsilon, qkv.most[i], normed, scale)
        _product(normed, scale, qkv.rows[i], qkv.scale[i], projected)
        _turn_and_store(projected, n, start, heads, turns, keys, values)
        _attend(projected, n, start, heads, keys, values, attended)
        _round(attended, out.most[i], mixed, scale)
        _product(mixed, scale, out.rows[i], out.scale[i], added)
        x += added
        _rms_norm(x, norms[i, 1], epsilon, gate_up.most[i], normed, scale)
        _gated_product(normed, scale, gate_up.rows[i], gate_up.scale[i], gated)
        _round(gated, down.most[i], hidden, scale)
        _product(hidden, scale, down.rows[i], down.scale[i], added)
        x += added
    rows = _padded(keep)
    last, logits = _aligned(rows, head.rows.shape[1]), np.empty((rows, len(head.rows)), f32)
    _rms_norm(x[n - keep : n], norm, epsilon, head.most, last, scale)
    _product(last, scale, head.rows, head.scale, logits)
    return logits[:keep]


@njit(cache=True, fastmath=_MATH)
def _rms_norm(x: Array, weight: Array, epsilon: np.float32, most: np.float32, y: Array, scale: Array) -> None:
    """x / √(mean x² + ε) · weight by row, rounded: as `_round` gives it."""
    normed = np.empty((1, len(weight)), f32)
    for r in range(len(x)):
        square = f32(0)
        for k in range(len(weight)):
            square += x[r, k] * x[r, k]
        root = f32(1) / np.sqrt(square / f32(len(weight)) + epsilon)
        for k in range(len(weight)):
            normed[0, k] = x[r, k] * root * weight[k]
        _round(normed, most, y[r : r + 1], scale[r : r + 1])


@njit(cache=True, fastmath=_MATH)
def _round(x: Array, most: np.float32, y: Array, scale: Array) -> None:
    """Rows of x [n, m] as y [n, ≥ m] int16, up to ±most, and scale [n]: x ≈ y · scale. Where a row is not finite its scale is NaN."""
    for r in range(len(x)):
        largest = _largest(x[r])
        if not largest < np.inf:
            scale[r] = np.nan
        elif largest == 0:
            scale[r], y[r] = 0, 0
        else:
            scale[r], steps = largest / most, most / largest
            for k in range(x.shape[1]):
                y[r, k] = i16(np.rint(x[r, k] * steps))


@njit(cache=True)
def _largest(x: Array) -> np.float32:
    """max |x|, inf or NaN where there is one: bits of positive floats are in the order of the floats, and integers compare in lanes."""
    bits, largest = x.view(i32), i32(0)
    for k in range(len(bits)):
        largest = i32(max(largest, i32(bits[k] & i32(0x7FFFFFFF))))
    return i32(largest).view(f32)


@njit(parallel=True, cache=True)
def _product(x: Array, x_scale: Array, weight: Array, scale: Array, y: Array) -> None:
    """y [n, out] = (x [n, in] · x_scale [n]) · (weight [out, in] · scale [out])ᵀ; n is 1 or a multiple of ROWS."""
    for tile in prange((len(weight) + _TILE - 1) // _TILE):
        first = tile * _TILE
        _outputs(x, x_scale, weight, scale, first, min(first + _TILE, len(weight)), y, first)


@njit(parallel=True, cache=True, fastmath=_MATH)
def _gated_product(x: Array, x_scale: Array, weight: Array, scale: Array, y: Array) -> None:
    """y [n, m] = SiLU(gate) · up, which are the two halves of the product with weight [2 m, in]."""
    size = len(weight) // 2
    for tile in prange((size + _TILE - 1) // _TILE):
        first, last = tile * _TILE, min((tile + 1) * _TILE, size)
        up = np.empty((len(x), last - first), f32)
        _outputs(x, x_scale, weight, scale, first, last, y, first)
        _outputs(x, x_scale, weight, scale, size + first, size + last, up, 0)
        for r in range(len(x)):
            for o in range(first, last):
                gate = y[r, o]
                y[r, o] = gate / (f32(1) + exp(-gate)) * up[r, o - first]


@njit(cache=True)
def _outputs(
    x: Array, x_scale: Array, weight: Array, scale: Array, first: int, last: int, y: Array, at: int
) -> None:  # fmt: skip
    """Outputs first, …, last - 1 of a product, to y from column `at` on."""
    if len(x) == 1:
        for o in range(first, last):
            y[0, at + o - first] = f32(dot(weight, o, x, 0)[0]) * (scale[o] * x_scale[0])
    else:
        for r in range(0, len(x), ROWS):
            for o in range(first, last):
                sums = dots(weight, o, x, r)
                for j in range(ROWS):
                    y[r + j, at + o - first] = f32(sums[j]) * (scale[o] * x_scale[r + j])


@njit(cache=True)
def _turn_and_store(projected: Array, n: int, start: int, heads: int, turns: Array, keys: Array, values: Array) -> None:
    """RoPE on queries and keys, neighbours being a pair, in place; keys and values to their places in the cache."""
    groups, width = len(keys), keys.shape[2]
    for r in range(n):
        for h in range(heads + groups):
            for i in range(width // 2):
                at = h * width + 2 * i
                even, odd = projected[r, at], projected[r, at + 1]
                cosine, sine = turns[start + r, i]
                projected[r, at], projected[r, at + 1] = even * cosine - odd * sine, even * sine + odd * cosine
        block, lane = (start + r) // _KEYS, (start + r) % _KEYS
        for g in range(groups):
            key, value = (heads + g) * width, (heads + groups + g) * width
            keys[g, block, :, lane] = projected[r, key : key + width]
            values[g, start + r] = projected[r, value : value + width]


@njit(parallel=True, cache=True, fastmath=_MATH)
def _attend(projected: Array, n: int, start: int, heads: int, keys: Array, values: Array, y: Array) -> None:
    """Causal attention of every row over the cache, keys [groups, blocks, width, _KEYS], values [groups, length, width]: y [n, heads · width].

    The heads of a group share their keys and values, and so do rows but for the last few: a task takes some queries together, a block of
    keys at a time.
    """
    groups, width = len(keys), keys.shape[2]
    shared = heads // groups
    root = f32(1) / np.sqrt(f32(width))
    chunks = (n * shared + _QUERIES - 1) // _QUERIES
    for task in prange(groups * chunks):
        g, first = task // chunks, task % chunks * _QUERIES
        size = min(_QUERIES, n * shared - first)
        queries, counts = np.empty((size, width), f32), np.empty(size, np.int64)
        for q in range(size):
            r, h = (first + q) // shared, g * shared + (first + q) % shared
            queries[q] = projected[r, h * width : (h + 1) * width]
            counts[q] = start + r + 1
        blocks = (counts[-1] + _KEYS - 1) // _KEYS
        weights, means = np.zeros((size, blocks * _KEYS), f32), np.zeros((size, width), f32)
        for block in range(blocks):
            add_rows(queries, keys[g, block], weights[:, block * _KEYS : (block + 1) * _KEYS])
        for q in range(size):
            _softmax(weights[q, : counts[q]], root)
        whole = counts[0] // _KEYS * _KEYS  # positions in blocks that every query sees to their end
        for at in range(0, whole, _KEYS):
            add_rows(weights[:, at : at + _KEYS], values[g, at : at + _KEYS], means)
        for q in range(size):
            for at in range(whole, counts[q], _KEYS):
                end = min(at + _KEYS, counts[q])
                add_rows(weights[q : q + 1, at:end], values[g, at:end], means[q : q + 1])
            r, h = (first + q) // shared, g * shared + (first + q) % shared
            y[r, h * width : (h + 1) * width] = means[q]


@njit(cache=True)
def _highest(x: Array) -> np.float32:
    """max x, or NaN where there is one: with the bits of negative floats turned over, integers are in the order of the floats."""
    bits, top = x.view(i32), i32(-0x80000000)
    for t in range(len(bits)):
        top = i32(max(top, i32(bits[t] ^ i32(i32(bits[t] >> i32(31)) & i32(0x7FFFFFFF)))))
    return i32(top ^ i32(i32(top >> i32(31)) & i32(0x7FFFFFFF))).view(f32)


@njit(cache=True, fastmath=_MATH)
def _softmax(scores: Array, scale: np.float32) -> None:
    """In place, of scores times scale."""
    highest = _highest(scores)
    total = f32(0)
    for t in range(len(scores)):
        scores[t] = exp((scores[t] - highest) * scale)
        total += scores[t]
    scores /= total
