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

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from flashspec.machine import compiled_loops

ACCEPT = 0  # acceptance uniforms, index = offset in the block
RACE = 1  # replacement, bonus and coupled noise, one word per vocabulary entry
DRAFT = 2  # the drafter's own sampling, one word

MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
LANES = 256  # token v takes word (v // 256) % 4 of counter (v // 1024) * 256 + v % 256


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32 on int64 tensors that hold 32-bit words; shapes broadcast. int64 wraps silently, which is all it needs.

    `flashspec.loops` compiles this function for single int64 words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c2 = ((product_1 >> 32) & MASK) ^ c1 ^ k0, ((product_0 >> 32) & MASK) ^ c3 ^ k1
        c1, c3 = product_1 & MASK, product_0 & MASK
        k0, k1 = (k0 + _WEYL_0) & MASK, (k1 + _WEYL_1) & MASK
    return c0, c1, c2, c3


def uniforms(seed: Tensor, position: Tensor, count: int, purpose: int = ACCEPT, offset: int = 0) -> Tensor:
    """Uniforms in (0, 1]: [B] int64, [B] int64 -> [B, count] float32, never 0."""
    if loops := compiled_loops(seed):
        second, places = purpose + 256 * offset, _pairs(seed, position)
        return torch.tensor(
            [[loops.uniform(*place, i, second) for i in range(count)] for place in places], dtype=torch.float32
        ).view(len(seed), count)
    words = _words(seed, position, purpose, offset, -(-count // 4))  # [B, 4, counters]
    return words.transpose(1, 2).reshape(len(seed), -1)[:, :count]


def exponentials(seed: Tensor, position: Tensor, vocabulary: int, purpose: int, offset: int = 0) -> Tensor:
    """Exp(1) noise of one position: [B] int64, [B] int64 -> [B, V] float32. argmax w/E draws v with probability ∝ w(v)."""
    if loops := compiled_loops(seed):
        rows = [loops.noise(*place, purpose + 256 * offset, vocabulary) for place in _pairs(seed, position)]
        return torch.from_numpy(np.stack(rows) if len(rows) != 1 else rows[0][None])
    if vocabulary <= LANES:  # the first word of as many counters
        words = _words(seed, position, purpose, offset, vocabulary)[:, 0]
    else:
        blocks = -(-vocabulary // (4 * LANES))
        words = _words(seed, position, purpose, offset, blocks * LANES)  # [B, 4, blocks * 256]
        words = words.unflatten(2, (blocks, LANES)).transpose(1, 2).reshape(len(seed), -1)[:, :vocabulary]
    # -log1p(-u) and not -log(u): the small values, which win the race, keep the 2^-32 grid of the words.
    return words.clamp(max=1 - 2**-24).neg_().log1p_().neg_()


def race(weights: Tensor, noise: Tensor) -> Tensor:
    """argmax of weights / noise over the last axis (exponential race, the Gumbel-max trick): [..., V] -> [...]."""
    return (weights / noise).argmax(-1)


def inverse(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first v whose cumulative weight reaches uniform · total: [B, V], [B, 1] -> [B]. One uniform instead of a race of V."""
    if loops := compiled_loops(weights):
        rows = zip(weights.float().contiguous().numpy(), uniform[:, 0].tolist(), strict=True)
        return torch.tensor([loops.draw(row, u) for row, u in rows], dtype=torch.int64)
    reached = weights.double().cumsum(-1)
    return torch.searchsorted(reached, uniform * reached[:, -1:])[:, 0].clamp_(max=weights.shape[-1] - 1)


def choose(weights: Tensor, seed: Tensor, position: Tensor, purpose: int, offset: int = 0) -> Tensor:
    """`inverse` with the uniform of (seed, position, purpose, offset): [B, V], [B], [B] -> [B]."""
    if loops := compiled_loops(weights):
        rows, second = weights.float().contiguous().numpy(), purpose + 256 * offset
        places = zip(rows, _pairs(seed, position), strict=True)
        return torch.tensor([loops.draw(row, loops.uniform(*place, 0, second)) for row, place in places])
    return inverse(weights, uniforms(seed, position, 1, purpose, offset))


def seeds(seed: int, batch: int = 1, device: torch.device | str = "cpu") -> Tensor:
    """Any Python integer as a 64-bit key: [B] int64."""
    folded = seed & 0xFFFFFFFFFFFFFFFF
    return torch.full((batch,), folded - (1 << 64) if folded >> 63 else folded, dtype=torch.int64, device=device)


def _pairs(seed: Tensor, position: Tensor) -> Iterator[tuple[int, int]]:
    return zip(seed.tolist(), position.tolist(), strict=True)


def _words(seed: Tensor, position: Tensor, purpose: int, offset: int, counters: int) -> Tensor:
    """[B], [B] -> [B, 4, counters] float32 in (0, 1], one from each word."""
    index = torch.arange(counters, device=seed.device)
    zero, key, place = index * 0, seed[:, None], position[:, None]
    counter = (index + 0 * key, zero + purpose + 256 * offset, zero + (place & MASK), zero + ((place >> 32) & MASK))
    return _unit(torch.stack(philox(counter, (key & MASK, (key >> 32) & MASK)), 1).to(torch.float32))


def _unit(words: Tensor) -> Tensor:
    """Words as float32 -> (0, 1], in place."""
    return words.add_(0.5).mul_(2**-32)
