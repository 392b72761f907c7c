"""Counter-based random numbers: every draw is a pure function of (seed, position, purpose, offset, index).

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Nothing here has a state, so two
runs never share a stream, a run can be repeated from any round, and a kernel that follows the same layout draws the
same bits whatever its grid, block size or batch slot.

    key      = (seed low, seed high)
    counter  = (index, purpose + 256 * offset, position low, position high)

`position` is the absolute index of a token in prompt + output: the token's own for RACE, that of the first drafted
token of the round for ACCEPT and DRAFT. The block rule looks at every draft and every uniform of a block, also behind
a rejection; keyed by the round, they are never seen twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

ACCEPT = 0  # acceptance uniforms, index = offset in the block
RACE = 1  # replacement, bonus and coupled noise, one word per vocabulary entry
DRAFT = 2  # the drafter's own sampling, one word

_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_FEW = 32  # requests that are drawn for one by one on a CPU
_LANES = 256  # token v takes word (v // 256) % 4 of counter (v // 1024) * 256 + v % 256


Word = TypeVar("Word", Tensor, int)


def philox(counter: Sequence[Word], key: Sequence[Word]) -> tuple[Word, Word, Word, Word]:
    """Ten rounds of Philox4x32 on integers, or on int64 tensors that hold 32-bit words; shapes broadcast. int64 wraps silently, which is all
    it needs."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c2 = ((product_1 >> 32) & _MASK) ^ c1 ^ k0, ((product_0 >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = product_1 & _MASK, product_0 & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def philox_on_host(counters: int, second: int, position: int, seed: int) -> np.ndarray:
    """The same for one position on a CPU: in plain integers for one or two counters, else in place in numpy, where short arrays cost a
    fraction of what they cost torch.

    Counters (0 … counters − 1, second, position) -> words [4, counters] uint32.
    """
    key = seed & _MASK, (seed >> 32) & _MASK
    if counters <= 2:
        place = second & _MASK, position & _MASK, (position >> 32) & _MASK
        words = [philox((i, *place), key) for i in range(counters)]
        return np.array(words, np.uint32).reshape(counters, 4).T
    mask, half = np.uint64(_MASK), np.uint64(32)
    c0 = np.arange(counters, dtype=np.uint64)
    c1, c2, c3 = (np.full(counters, v & _MASK, np.uint64) for v in (second, position, position >> 32))
    product_0, product_1 = np.empty_like(c0), np.empty_like(c0)
    k0, k1 = key
    for _ in range(10):
        np.multiply(c0, np.uint64(_MULTIPLIER_0), out=product_0)
        np.multiply(c2, np.uint64(_MULTIPLIER_1), out=product_1)
        for upper, product, other, round_key in ((c0, product_1, c1, k0), (c2, product_0, c3, k1)):
            np.right_shift(product, half, out=upper)
            upper ^= other  # whose upper half may hold rubbish, until the mask
            upper ^= np.uint64(round_key)
            upper &= mask
        c1, product_1 = product_1, c1
        c3, product_0 = product_0, c3
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return np.stack([c.astype(np.uint32) for c in (c0, c1, c2, c3)])


def uniforms(seed: Tensor, position: Tensor, count: int, purpose: int = ACCEPT, offset: int = 0) -> Tensor:
    """Uniforms in (0, 1]: [B] int64, [B] int64 -> [B, count] float32, never 0."""
    words = _words(seed, position, purpose, offset, -(-count // 4))  # [B, 4, counters]
    return words.transpose(1, 2).reshape(len(seed), -1)[:, :count]


def exponentials(seed: Tensor, position: Tensor, vocabulary: int, purpose: int, offset: int = 0) -> Tensor:
    """Exp(1) noise of one position: [B] int64, [B] int64 -> [B, V] float32. argmax w/E draws v with probability ∝ w(v)."""
    if vocabulary <= _LANES:  # the first word of as many counters
        words = _words(seed, position, purpose, offset, vocabulary)[:, 0]
    else:
        blocks = -(-vocabulary // (4 * _LANES))
        words = _words(seed, position, purpose, offset, blocks * _LANES)  # [B, 4, blocks * 256]
        words = words.unflatten(2, (blocks, _LANES)).transpose(1, 2).reshape(len(seed), -1)[:, :vocabulary]
    # -log1p(-u) and not -log(u): the small values, which win the race, keep the 2^-32 grid of the words.
    return words.clamp(max=1 - 2**-24).neg_().log1p_().neg_()


def race(weights: Tensor, noise: Tensor) -> Tensor:
    """argmax of weights / noise over the last axis (exponential race, the Gumbel-max trick): [..., V] -> [...]."""
    return (weights / noise).argmax(-1)


def inverse(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first v whose cumulative weight reaches uniform · total: [B, V], [B, 1] -> [B]. One uniform instead of a race of V."""
    reached = weights.double().cumsum(-1)
    return torch.searchsorted(reached, uniform * reached[:, -1:])[:, 0].clamp_(max=weights.shape[-1] - 1)


def seeds(seed: int, batch: int = 1, device: torch.device | str = "cpu") -> Tensor:
    """Any Python integer as a 64-bit key: [B] int64."""
    folded = seed & 0xFFFFFFFFFFFFFFFF
    return torch.full((batch,), folded - (1 << 64) if folded >> 63 else folded, dtype=torch.int64, device=device)


def _words(seed: Tensor, position: Tensor, purpose: int, offset: int, counters: int) -> Tensor:
    """[B], [B] -> [B, 4, counters] float32 in (0, 1], one from each word."""
    second = purpose + 256 * offset
    if seed.device.type == "cpu" and len(seed) <= _FEW:
        places = zip(seed.tolist(), position.tolist(), strict=True)
        words = np.stack([philox_on_host(counters, second, place, key) for key, place in places])
        return _unit(torch.from_numpy(words.astype(np.float32)))
    index = torch.arange(counters, device=seed.device)
    zero, key, place = index * 0, seed[:, None], position[:, None]
    counter = (index + 0 * key, zero + second, zero + (place & _MASK), zero + ((place >> 32) & _MASK))
    return _unit(torch.stack(philox(counter, (key & _MASK, (key >> 32) & _MASK)), 1).to(torch.float32))


def _unit(words: Tensor) -> Tensor:
    """Words as float32 -> (0, 1], in place."""
    return words.add_(0.5).mul_(2**-32)
