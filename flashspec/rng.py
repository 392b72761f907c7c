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

from typing import Any

import numpy as np
import torch
from torch import Tensor

ACCEPT = 0  # acceptance uniforms, index = offset in the block
RACE = 1  # replacement, bonus and coupled noise, one word per vocabulary entry
DRAFT = 2  # the drafter's own sampling, one word per vocabulary entry

Array = Any  # numpy array or torch tensor of int64: both wrap silently, which is all that Philox needs

_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LANES = 256  # token v takes word (v // 256) % 4 of counter (v // 1024) * 256 + v % 256


def philox(counter: tuple[Array, Array, Array, Array], key: tuple[Array, Array]) -> tuple[Array, Array, Array, Array]:
    """Ten rounds of Philox4x32 on int64 arrays that hold 32-bit words; shapes broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0 = ((product_1 >> 32) & _MASK) ^ c1 ^ k0
        c1 = product_1 & _MASK
        c2 = ((product_0 >> 32) & _MASK) ^ c3 ^ k1
        c3 = product_0 & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def uniforms(seed: Tensor, position: Tensor, count: int) -> Tensor:
    """Acceptance uniforms in (0, 1]: [B] int64, [B] int64 -> [B, count] float32, never 0."""
    words = _words(seed, position, ACCEPT, 0, -(-count // 4))  # [B, counters, 4]
    return _unit(words.reshape(len(seed), -1)[:, :count])


def exponentials(seed: Tensor, position: Tensor, vocabulary: int, purpose: int, offset: int = 0) -> Tensor:
    """Exp(1) noise of one position: [B] int64, [B] int64 -> [B, V] float32. argmax w/E draws v with probability ∝ w(v)."""
    blocks = -(-vocabulary // (4 * _LANES))
    words = _words(seed, position, purpose, offset, blocks * _LANES)  # [B, blocks * 256, 4]
    words = words.reshape(len(seed), blocks, _LANES, 4).transpose(2, 3).reshape(len(seed), -1)[:, :vocabulary]
    # -log1p(-u) and not -log(u): the small values, which win the race, keep the 2^-32 grid of the words.
    return -torch.log1p(-_unit(words).clamp(max=1 - 2**-24))


def race(weights: Tensor, noise: Tensor) -> Tensor:
    """argmax of weights / noise over the last axis (exponential race, the Gumbel-max trick): [..., V] -> [...]."""
    return (weights / noise).argmax(-1)


def seeds(seed: int, batch: int = 1, device: torch.device | str = "cpu") -> Tensor:
    """Any Python integer as a 64-bit key: [B] int64."""
    folded = seed & 0xFFFFFFFFFFFFFFFF
    return torch.full((batch,), folded - (1 << 64) if folded >> 63 else folded, dtype=torch.int64, device=device)


def _words(seed: Tensor, position: Tensor, purpose: int, offset: int, counters: int) -> Tensor:
    """[B], [B] -> [B, counters, 4] int64 words."""
    on_cpu = seed.device.type == "cpu"
    # On a CPU numpy runs the same lines: its cost per operation on short arrays is a quarter of torch's.
    key, place = (seed.numpy(), position.numpy()) if on_cpu else (seed, position)
    index = np.arange(counters) if on_cpu else torch.arange(counters, device=seed.device)
    zero = index * 0
    key, place = key[:, None], place[:, None]
    counter = (index + 0 * key, zero + purpose + 256 * offset, zero + (place & _MASK), zero + ((place >> 32) & _MASK))
    words = philox(counter, (key & _MASK, (key >> 32) & _MASK))
    return torch.from_numpy(np.stack(words, -1)) if on_cpu else torch.stack(words, -1)


def _unit(words: Tensor) -> Tensor:
    """32-bit words -> float32 in (0, 1]."""
    return (words.to(torch.float32) + 0.5) * 2**-32
