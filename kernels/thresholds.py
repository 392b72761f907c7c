"""top-k, top-p and min-p as one threshold a row, found on the device without sorting.

Floats are compared through their order-preserving integers, and the threshold is built two bits at a time from the top: the largest value
whose tail (the entries not smaller) still has k entries, or the wanted mass. Ties are kept, as in `flashspec/sampling.py`.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NEG_INF = tl.constexpr(float("-inf"))
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def ordered_bits(x):
    """float32 -> int64 in 0..2^32-1 with the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648


@triton.jit
def from_ordered_bits(key):
    bits = (key - 2147483648).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def tail(row, V, bound, top, scale, floor, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Entries (or mass relative to the largest) of those >= floor whose ordered bits are at least `bound`."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(row + start + lane, mask=start + lane < V, other=NEG_INF).to(tl.float32)
        inside = (ordered_bits(x) >= bound) & (x >= floor) & (start + lane < V)
        weight = tl.exp2((x - top) * scale) if BY_MASS else x * 0.0 + 1.0
        total += tl.where(inside, weight, 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def search(row, V, wanted, top, scale, floor, BITS: tl.constexpr, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Largest value whose tail reaches `wanted`. BITS: how many leading bits can differ (16 for bfloat16, 19 for float16, 32)."""
    lane = tl.arange(0, BLOCK)
    prefix = tl.full((), 0, tl.int64)
    for step in tl.static_range((BITS + 1) // 2):
        one = prefix + (1 << (30 - 2 * step))
        two = prefix + (2 << (30 - 2 * step))
        three = prefix + (3 << (30 - 2 * step))
        at_one = tl.zeros([BLOCK], dtype=tl.float32)
        at_two = at_one
        at_three = at_one
        for start in range(0, V, BLOCK):
            x = tl.load(row + start + lane, mask=start + lane < V, other=NEG_INF).to(tl.float32)
            key = ordered_bits(x)
            inside = (x >= floor) & (start + lane < V)
            if BY_MASS:
                weight = tl.where(inside, tl.exp2((x - top) * scale), 0.0)
            else:
                weight = tl.where(inside, 1.0, 0.0)
            at_one += tl.where(key >= one, weight, 0.0)
            at_two += tl.where(key >= two, weight, 0.0)
            at_three += tl.where(key >= three, weight, 0.0)
        enough_one = tl.sum(at_one, axis=0) >= wanted
        enough_two = tl.sum(at_two, axis=0) >= wanted
        enough_three = tl.sum(at_three, axis=0) >= wanted
        prefix = tl.where(enough_three, three, tl.where(enough_two, two, tl.where(enough_one, one, prefix)))
    return from_ordered_bits(prefix)


# One program a row.
#
# logits      [B, R, V] float32, bfloat16 or float16, unit stride over V
# temperature [B] float32 (<= 0: greedy, nothing is cut); top_k [B] int32 (0: all); top_p, min_p [B] float32
# threshold   [B, R] float32 out: an entry stays where x >= threshold


@triton.jit(do_not_specialize=["R"])
def threshold_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, threshold_ptr, V, batch_stride, row_stride, R,
    BITS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    b = (program // R).to(tl.int64)
    row = logits_ptr + b * batch_stride + (program % R).to(tl.int64) * row_stride
    temperature = tl.load(temperature_ptr + b)
    scale = LOG2E / tl.where(temperature <= 0.0, 1.0, temperature)
    lane = tl.arange(0, BLOCK)
    top = tl.full((), NEG_INF, tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(row + start + lane, mask=start + lane < V, other=NEG_INF).to(tl.float32)
        top = tl.maximum(top, tl.max(x, axis=0))
    threshold = tl.full((), NEG_INF, tl.float32)
    if temperature > 0.0:
        if TOP_K:
            k = tl.load(top_k_ptr + b)
            if (k > 0) & (k < V):
                threshold = search(row, V, k.to(tl.float32), top, scale, threshold, BITS, False, BLOCK)
        if TOP_P:
            top_p = tl.load(top_p_ptr + b)
            if top_p < 1.0:
                whole = tail(row, V, tl.full((), 0, tl.int64), top, scale, threshold, True, BLOCK)
                wanted = tl.maximum(top_p * whole, 1e-30)
                threshold = tl.maximum(threshold, search(row, V, wanted, top, scale, threshold, BITS, True, BLOCK))
        if MIN_P:
            min_p = tl.load(min_p_ptr + b)
            if min_p > 0.0:
                threshold = tl.maximum(threshold, top + tl.log2(min_p) / scale)
    tl.store(threshold_ptr + program, tl.minimum(threshold, top))
