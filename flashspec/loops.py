"""What sampling does with a whole vocabulary on a CPU, in loops that Numba compiles: softmax, noise, a draw, the largest entry.

The same functions as those of `flashspec.rng` and `flashspec.sampling` in PyTorch, in a fraction of their time: one or two passes over a
row that stays in the processor's cache, instead of ten.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from flashspec import rng
from flashspec.lanes import exp, exponential

_MATH = {"reassoc", "contract", "nsz"}
_CHUNK = 1024  # entries whose weights are summed at once
_INFINITE, _NAN = 0x7F800000, 0x7FFFFFFF  # bits of float32

f32, i32, u32 = np.float32, np.int32, np.uint32
Array = np.ndarray


_philox = njit(cache=True)(rng.philox)


@njit(cache=True, inline="always")
def _words(index: int, second: int, place: int, key: int) -> tuple[int, ...]:
    """The four words of a counter."""
    half = (place & rng.MASK, (place >> 32) & rng.MASK)
    return _philox((index, second, *half), (key & rng.MASK, (key >> 32) & rng.MASK))


@njit(cache=True, inline="always")
def _unit(word: int) -> np.float32:
    return (f32(u32(word)) + f32(0.5)) * f32(2.0**-32)


@njit(nogil=True, cache=True)
def uniform(key: int, place: int, index: int, second: int = 0) -> np.float32:
    """Entry `index` of `rng.uniforms` for one request."""
    return _unit(_words(index // 4, second, place, key)[index % 4])


@njit(nogil=True, cache=True)
def noise(key: int, place: int, second: int, vocabulary: int) -> Array:
    """`rng.exponentials` for one request: [V] float32."""
    short = vocabulary <= rng.LANES
    counters = vocabulary if short else (vocabulary + 4 * rng.LANES - 1) // (4 * rng.LANES) * rng.LANES
    out = np.empty(counters if short else 4 * counters, f32)
    for first in range(0, counters, rng.LANES):
        for i in range(min(rng.LANES, counters - first)):
            words = _words(first + i, second, place, key)
            if short:
                out[i] = _unit(words[0])
            else:
                for word in range(4):
                    out[4 * first + word * rng.LANES + i] = _unit(words[word])
    for v in range(len(out)):
        out[v] = exponential(min(out[v], f32(1 - 2.0**-24)))
    return out[:vocabulary]


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


@njit(nogil=True, cache=True, fastmath=_MATH)
def softmax(rows: Array, temperature: float) -> Array:
    """softmax(rows / temperature) of rows [n, V]; NaN where an entry is NaN or +inf, or all are -inf."""
    probabilities, inverse = np.empty_like(rows), f32(1 / temperature)
    for r in range(len(rows)):
        top, total = highest(rows[r]), f32(0)
        for v in range(rows.shape[1]):
            probabilities[r, v] = exp((rows[r, v] - top) * inverse)
            total += probabilities[r, v]
        for v in range(rows.shape[1]):
            probabilities[r, v] /= total
    return probabilities


@njit(nogil=True, cache=True)
def are_usable(rows: Array) -> bool:
    """Whether the largest entry of every row [n, V] is a finite number."""
    usable = True
    for r in range(len(rows)):
        usable &= -np.inf < highest(rows[r]) < np.inf
    return usable


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
