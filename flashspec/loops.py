"""What sampling does with a whole vocabulary on a CPU, in loops that Numba compiles: noise, softmax, a draw.

The same functions as those of `flashspec.rng` and `flashspec.sampling` in PyTorch, in a fraction of their time: one or two passes over a
row that stays in the processor's cache, instead of ten.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from flashspec.lanes import exp, exponential

_MATH = {"reassoc", "contract", "nsz"}
_WORDS = 1024  # entries of a vocabulary that 256 counters serve
_LANES = 256
_CHUNK = 1024  # entries whose weights are summed at once
_INFINITE, _NAN = 0x7F800000, 0x7FFFFFFF  # bits of float32

f32, i32, u32, u64 = np.float32, np.int32, np.uint32, np.uint64
Array = np.ndarray


@njit(cache=True, inline="always")
def _philox(c0: Any, second: int, place_low: int, place_high: int, key_low: int, key_high: int) -> tuple[Any, ...]:
    """`flashspec.rng.philox` on 32-bit words in uint64."""
    mask, half = u64(0xFFFFFFFF), u64(32)
    c1, c2, c3, k0, k1 = u64(second), u64(place_low), u64(place_high), u64(key_low), u64(key_high)
    for _ in range(10):
        a, b = c0 * u64(0xD2511F53), c2 * u64(0xCD9E8D57)
        c0, c2 = (b >> half) ^ c1 ^ k0, (a >> half) ^ c3 ^ k1
        c1, c3 = b & mask, a & mask
        k0, k1 = (k0 + u64(0x9E3779B9)) & mask, (k1 + u64(0xBB67AE85)) & mask
    return c0, c1, c2, c3


@njit(cache=True, inline="always")
def _unit(word: int) -> np.float32:
    return (f32(u32(word)) + f32(0.5)) * f32(2.0**-32)


@njit(nogil=True, cache=True)
def uniform(key: int, place: int, index: int, second: int = 0) -> np.float32:
    """Entry `index` of `rng.uniforms` for one request."""
    mask, half = u64(0xFFFFFFFF), u64(32)
    words = _philox(u64(index // 4), second, u64(place) & mask, u64(place) >> half, u64(key) & mask, u64(key) >> half)
    return _unit(words[index % 4])


@njit(nogil=True, cache=True)
def noise(key: int, place: int, second: int, vocabulary: int) -> Array:
    """`rng.exponentials` for one request: [V] float32."""
    mask, half = u64(0xFFFFFFFF), u64(32)
    low, high, k0, k1 = u64(place) & mask, u64(place) >> half, u64(key) & mask, u64(key) >> half
    counters = vocabulary if vocabulary <= _LANES else (vocabulary + _WORDS - 1) // _WORDS * _LANES
    out = np.empty(counters if vocabulary <= _LANES else 4 * counters, f32)
    for first in range(0, counters, _LANES):
        for i in range(min(_LANES, counters - first)):
            a, b, c, d = _philox(u64(first + i), second, low, high, k0, k1)
            if vocabulary <= _LANES:
                out[i] = _unit(a)
            else:
                at = 4 * first + i
                out[at], out[at + _LANES], out[at + 2 * _LANES], out[at + 3 * _LANES] = (
                    _unit(a),
                    _unit(b),
                    _unit(c),
                    _unit(d),
                )
    for v in range(len(out)):
        out[v] = exponential(min(out[v], f32(1 - 2.0**-24)))
    return out[:vocabulary]


@njit(nogil=True, cache=True, fastmath=_MATH)
def softmax(logits: Array, temperature: np.float32) -> Array:
    """Rows of logits [n, V] at a temperature as probabilities [n, V]; NaN where a row cannot be sampled."""
    p = np.empty_like(logits)
    for r in range(len(logits)):
        largest = highest(logits[r])
        if not -np.inf < largest < np.inf:
            p[r] = np.nan
            continue
        total = 0.0
        for first in range(0, p.shape[1], _CHUNK):
            part: Any = f32(0)
            for v in range(first, min(first + _CHUNK, p.shape[1])):
                p[r, v] = exp((logits[r, v] - largest) / temperature)
                part += p[r, v]
            total += part
        scale = f32(1 / total)
        for v in range(p.shape[1]):
            p[r, v] *= scale
    return p


@njit(nogil=True, cache=True)
def highest(row: Array) -> np.float32:
    """The largest entry, NaN where there is one."""
    top = _top(row)
    if top == _NAN:
        return f32(np.nan)
    return i32(top).view(f32) if top >= 0 else -i32(-top).view(f32)


@njit(nogil=True, cache=True)
def first_largest(row: Array) -> int:
    """Where the largest entry is, the first of equals; 0 where there is a NaN."""
    wanted = highest(row)
    for v in range(len(row)):
        if row[v] == wanted:
            return v
    return 0


@njit(cache=True)
def _top(row: Array) -> Any:
    """The largest entry as an integer in the order of floats: theirs are in order but for the sign, and integers compare in lanes."""
    bits, top, magnitude = row.view(i32), i32(-_NAN), i32(0)
    for v in range(len(bits)):
        size = i32(bits[v] & i32(0x7FFFFFFF))
        magnitude = i32(max(magnitude, size))
        top = i32(max(top, size if bits[v] >= 0 else i32(-size)))
    return _NAN if magnitude > _INFINITE else top


@njit(nogil=True, cache=True)
def draw(weights: Array, uniform: float) -> int:
    """`rng.inverse` for one request: the first v at which the running sum of weights [V] reaches uniform · total."""
    chunks = np.zeros((len(weights) + _CHUNK - 1) // _CHUNK)
    for c in range(len(chunks)):
        chunks[c] = _sum(weights[c * _CHUNK : (c + 1) * _CHUNK])
    goal, reached, c = uniform * chunks.sum(), 0.0, 0
    while c < len(chunks) - 1 and reached + chunks[c] < goal:
        reached += chunks[c]
        c += 1
    found = 0
    for v in range(c * _CHUNK, min((c + 1) * _CHUNK, len(weights))):
        if weights[v] > 0:
            found = v
            reached += weights[v]
            if reached >= goal:
                break
    return found


@njit(cache=True, fastmath=_MATH)
def _sum(weights: Array) -> float:
    total = 0.0
    for weight in weights:
        total += weight
    return total
