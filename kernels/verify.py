"""Verification of drafted blocks in Triton: raw logits in, tokens out, nothing read by the host.

Every quantity is in base 2 and float32: a logit x at temperature T becomes y = x * log2(e) / T, a log-sum-exp L makes p = 2^(y - L).
Random bits come from Philox4x32-10 with the layout of `flashspec/rng.py`, so they depend on (seed, position, purpose) alone: not on grid,
block size, batch slot or device. Choosing a token is an exponential race (argmax w / E), which needs no normaliser, no prefix sum and no order.

Rows are read in two ways. In *statistics* and *surplus* a program owns one split of one row. In *draw* the P programs of a request share
the tiles of the one row that the next token comes from.
"""

import os

import torch
import triton
import triton.language as tl

# On an NVIDIA device the three functions that every vocabulary entry needs are single instructions; Triton's own spend several more
# on denormal numbers and on the last bit, neither of which decides a race.
NATIVE = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1" and torch.version.hip is None)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))
POS_INF = tl.constexpr(float("inf"))
NOWHERE = tl.constexpr(3.0e7)  # larger than any index that float32 holds exactly: V < 2^24

# What the draft is given as.
ONE_HOT = tl.constexpr(0)  # q(x) = 1
LOGITS = tl.constexpr(1)  # raw logits
LOGITS_LSE = tl.constexpr(2)  # raw logits and their log-sum-exp at the draft temperature, natural logarithm
PROBABILITIES = tl.constexpr(3)  # q itself, float32

# Which part of the work a launch does.
ALL = tl.constexpr(0)
STATISTICS = tl.constexpr(1)
SURPLUS = tl.constexpr(2)
DRAW = tl.constexpr(3)

# Purposes of flashspec/rng.py.
ACCEPT = tl.constexpr(0)
RACE = tl.constexpr(1)

# Bits of status.
UNUSABLE_ROW = tl.constexpr(1)  # NaN, +inf, or nothing but -inf in a row that mattered
BAD_ID = tl.constexpr(2)  # a drafted id outside 0..V-1, taken as rejected

# ------------------------------------------------------------------------------------------------------------ named quantities


@triton.jit
def exp2(x):
    """2^x, relative error 2^-22."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def log2(x):
    """log2 x, absolute error 2^-22."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def reciprocal(x):
    """1/x, relative error 2^-23; of 0 it is +inf."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def unit(word):
    """32 random bits -> float32 in (0, 1], as rng._unit."""
    return (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10


@triton.jit
def exponential(word):
    """32 random bits -> Exp(1). A series below 1/16, so that the small values that win keep the 2^-32 grid of the bits."""
    u = unit(word)
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * (0.25 + u * 0.2))))
    return tl.where(u < 0.0625, series, -LN2 * log2(tl.maximum(1.0 - u, 5.9604644775390625e-08)))


@triton.jit
def low_word(position):
    return (position & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def acceptance_uniforms(seed, position, test):
    """Uniform of each test: word test % 4 of counter test // 4."""
    zero = test * 0
    a, b, c, d = tl.philox(
        seed, test // 4, zero + ACCEPT, zero + low_word(position), zero + (position >> 32).to(tl.int32)
    )
    word = tl.where(test % 4 == 0, a, tl.where(test % 4 == 1, b, tl.where(test % 4 == 2, c, d)))
    return unit(word)


@triton.jit
def ordered(key, index):
    """(float key, index) -> int64 whose maximum is the largest key and, among equals, the smallest index."""
    bits = key.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def index_of(packed):
    return 0x7FFFFFFF - (packed & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def is_unusable(packed):
    """Whether the largest raw key of a row was NaN or +inf, or nothing but -inf was there."""
    high = (packed >> 32).to(tl.int32)
    return (high >= 0x7F800000) | (high <= -0x7F800001)


@triton.jit
def grow(largest, total, raw, scale, threshold, TRUNCATE: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr):
    """Online softmax: running maximum and sum of each group of VEC neighbours, which one thread holds: no barrier in here."""
    x = raw.to(tl.float32)
    if TRUNCATE:
        x = tl.where((x >= threshold) | (x != x), x, NEG_INF)
    x = tl.reshape(x, [BLOCK // VEC, VEC])
    larger = tl.maximum(largest, tl.max(x, axis=1))
    base = tl.where(larger == NEG_INF, 0.0, larger) * scale
    total = total * exp2(largest * scale - base) + tl.sum(exp2(x * scale - base[:, None]), axis=1)
    return larger, total


@triton.jit
def log_sum_exp(largest, total):
    """Groups -> one base-2 log-sum-exp. `largest` is scaled already."""
    top = tl.max(largest, axis=0)
    base = tl.where(top == NEG_INF, 0.0, top)
    return base + tl.log2(tl.sum(total * tl.exp2(largest - base), axis=0))


@triton.jit
def combined(parts):
    """Partial log-sum-exps of a row, [rows, splits] -> [rows]. NaN and +inf come through, an empty row is -inf."""
    top = tl.max(parts, axis=1)
    base = tl.where(top == NEG_INF, 0.0, top)
    return base + tl.log2(tl.sum(tl.exp2(parts - base[:, None]), axis=1))


@triton.jit
def clipped_product(limit_a, ratio_a, limit_b, ratio_b):
    """P -> min(limit, P * ratio), one step after the other, in logarithms: the clipped chain of the block rule is associative."""
    return tl.minimum(limit_b, limit_a + ratio_b), ratio_a + ratio_b


@triton.jit
def at(values, index, where):
    """values[index] of a small vector."""
    return tl.sum(tl.where(where == index, values, 0.0), axis=0)


# --------------------------------------------------------------------------------------------------------------- stages


@triton.jit
def row_statistics(
    target, draft, part, partial_plane, V, lo, target_scale, draft_scale, target_threshold, draft_threshold, NBLK, greedy,
    BLOCK: tl.constexpr, VEC: tl.constexpr, DRAFT: tl.constexpr, TRUNCATE: tl.constexpr,
):  # fmt: skip
    """One split of one row: log-sum-exps of target and draft, or (greedy) the target's maximum and where it is.

    Written to part[0] and part[partial_plane]. The next block is in flight while this one is summed.
    """
    lane = tl.arange(0, BLOCK)
    end = tl.minimum(lo + NBLK * BLOCK, V)
    offsets = lo + lane
    x = tl.load(target + offsets, mask=offsets < V, other=NEG_INF)
    if DRAFT == LOGITS:
        y = tl.load(draft + offsets, mask=offsets < V, other=NEG_INF)
    if greedy:
        best = tl.full((), NEG_INF, tl.float32)
        where = tl.full((), NOWHERE, tl.float32)
        for i in range(NBLK):
            xf = x.to(tl.float32)
            offsets = lo + i * BLOCK + lane
            xf = tl.where(xf != xf, POS_INF, xf)
            top = tl.max(xf, axis=0)
            first = tl.min(tl.where((xf == top) & (offsets < V), offsets.to(tl.float32), NOWHERE), axis=0)
            where = tl.where(top > best, first, where)
            best = tl.maximum(best, top)
            offsets = offsets + BLOCK
            x = tl.load(target + offsets, mask=offsets < end, other=NEG_INF)
        tl.store(part, best)
        tl.store(part + partial_plane, where)
    else:
        largest = tl.full([BLOCK // VEC], NEG_INF, tl.float32)
        total = tl.zeros([BLOCK // VEC], dtype=tl.float32)
        draft_largest = largest
        draft_total = total
        for i in range(1, NBLK):
            offsets = lo + i * BLOCK + lane
            x_next = tl.load(target + offsets, mask=offsets < V, other=NEG_INF)
            if DRAFT == LOGITS:
                y_next = tl.load(draft + offsets, mask=offsets < V, other=NEG_INF)
            largest, total = grow(largest, total, x, target_scale, target_threshold, TRUNCATE, BLOCK, VEC)
            x = x_next
            if DRAFT == LOGITS:
                draft_largest, draft_total = grow(
                    draft_largest, draft_total, y, draft_scale, draft_threshold, TRUNCATE, BLOCK, VEC
                )
                y = y_next
        largest, total = grow(largest, total, x, target_scale, target_threshold, TRUNCATE, BLOCK, VEC)
        tl.store(part, log_sum_exp(largest * target_scale, total))
        if DRAFT == LOGITS:
            draft_largest, draft_total = grow(
                draft_largest, draft_total, y, draft_scale, draft_threshold, TRUNCATE, BLOCK, VEC
            )
            tl.store(part + partial_plane, log_sum_exp(draft_largest * draft_scale, draft_total))


@triton.jit
def drafted_tokens(
    b, target_b, draft_b, ids_ptr, seed, position, target_threshold_ptr, draft_threshold_ptr, V, G, drafted, target_row, draft_row,
    target_scale, draft_scale, GP: tl.constexpr, DRAFT: tl.constexpr, TRUNCATE: tl.constexpr,
):  # fmt: skip
    """What the tests need and the statistics do not give: ids, their scaled logits (for PROBABILITIES log2 q), uniforms."""
    test = tl.arange(0, GP)
    is_drafted = test < drafted
    given = tl.load(ids_ptr + b * G + test, mask=is_drafted, other=-1)
    valid = is_drafted & (given >= 0) & (given < V)
    ids = tl.where(valid, given, -1).to(tl.int32)
    x = tl.load(target_b + test * target_row + ids, mask=valid, other=NEG_INF).to(tl.float32)
    if DRAFT == ONE_HOT:
        y = tl.zeros([GP], dtype=tl.float32)
    else:
        y = tl.load(draft_b + test * draft_row + ids, mask=valid, other=NEG_INF).to(tl.float32)
        if DRAFT == PROBABILITIES:
            y = tl.log2(tl.where(valid, y, 0.0))
    if TRUNCATE:
        x = tl.where(x >= tl.load(target_threshold_ptr + b * (G + 1) + test, mask=valid, other=POS_INF), x, NEG_INF)
        if (DRAFT == LOGITS) | (DRAFT == LOGITS_LSE):
            y = tl.where(y >= tl.load(draft_threshold_ptr + b * G + test, mask=valid, other=POS_INF), y, NEG_INF)
    if (DRAFT == LOGITS) | (DRAFT == LOGITS_LSE):
        y = y * draft_scale
    return ids, valid, x * target_scale, y, acceptance_uniforms(seed, position, test)


@triton.jit
def normalisers(
    b, part_ptr, draft_lse_ptr, plane, G, S, drafted, GP: tl.constexpr, SP: tl.constexpr, DRAFT: tl.constexpr
):
    """Log-sum-exps of the drafted rows, target and draft: [GP], [GP]."""
    test = tl.arange(0, GP)
    split = tl.arange(0, SP)
    rows = (b * G + test)[:, None] * S + split[None, :]
    there = (test < drafted)[:, None] & (split < S)[None, :]
    target_lse = combined(tl.load(part_ptr + rows, mask=there, other=NEG_INF, cache_modifier=".cg"))
    if DRAFT == LOGITS:
        draft_lse = combined(tl.load(part_ptr + plane + rows, mask=there, other=NEG_INF, cache_modifier=".cg"))
    elif DRAFT == LOGITS_LSE:
        draft_lse = tl.load(draft_lse_ptr + b * G + test, mask=test < drafted, other=0.0) * LOG2E
    else:
        draft_lse = tl.zeros([GP], dtype=tl.float32)
    return target_lse, draft_lse


@triton.jit
def log_ratios(valid, x, y, target_lse, draft_lse):
    """log2 p(x)/q(x) of each drafted token; -inf (reject) where p(x) = 0, q(x) = 0, the id is bad or a number is NaN."""
    log_p = x - target_lse
    log_q = y - draft_lse
    usable = valid & (log_q > NEG_INF) & (log_p > NEG_INF) & (log_p < POS_INF)
    return tl.where(usable, log_p - log_q, NEG_INF)


@triton.jit
def chain(log_ratio):
    """log2 P_i of the block rule, P_i = min(1, P_{i-1} r_i): [GP]."""
    limit, product = tl.associative_scan((tl.zeros_like(log_ratio), log_ratio), 0, clipped_product)
    return tl.minimum(limit, product)


@triton.jit
def surplus(
    target, draft, V, lo, target_scale, draft_scale, target_lse, draft_lse, log_prefix, target_threshold, draft_threshold, NBLK,
    BLOCK: tl.constexpr, DRAFT: tl.constexpr, TRUNCATE: tl.constexpr,
):  # fmt: skip
    """Sum over one split of max(P p - q, 0), with log2 P = log_prefix."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(NBLK):
        offsets = lo + i * BLOCK + lane
        inside = offsets < V
        x = tl.load(target + offsets, mask=inside, other=NEG_INF).to(tl.float32)
        if TRUNCATE:
            x = tl.where(x >= target_threshold, x, NEG_INF)
        if DRAFT == PROBABILITIES:
            q = tl.load(draft + offsets, mask=inside, other=0.0).to(tl.float32)
        else:
            y = tl.load(draft + offsets, mask=inside, other=NEG_INF).to(tl.float32)
            if TRUNCATE:
                y = tl.where(y >= draft_threshold, y, NEG_INF)
            q = exp2(y * draft_scale - draft_lse)
        total += tl.maximum(exp2(x * target_scale - target_lse + log_prefix) - q, 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def race(
    target, draft, V, first, step, seed, position, purpose, target_scale, draft_scale, target_lse, draft_lse, prefix,
    target_threshold, draft_threshold, rejected, raw, greedy, TILES: tl.constexpr, DRAFT: tl.constexpr, TRUNCATE: tl.constexpr,
):  # fmt: skip
    """This program's share (tiles first, first + step, …) of a race over one row -> packed winner.

    raw: race the target's logits themselves (bonus, coupled; without noise where greedy). Else race max(P p - q, 0); where nothing is
    positive, p = q up to rounding, negative keys -E/p race p.
    """
    WIDTH: tl.constexpr = TILES * 256
    lane = tl.arange(0, WIDTH)
    zero = lane * 0
    best = tl.full([WIDTH], NEG_INF, tl.float32)
    winner = zero
    position_low = zero + low_word(position)
    position_high = zero + (position >> 32).to(tl.int32)
    draft_end = tl.where(raw, 0, V)  # no draft stands under a bonus
    count = (V + 1024 * TILES - 1) // (1024 * TILES)
    for tile in range(first, count, step):
        w0, w1, w2, w3 = tl.philox(seed, tile * WIDTH + lane, zero + purpose, position_low, position_high)
        base = (tile * TILES + lane // 256) * 1024 + lane % 256
        for k in tl.static_range(4):
            token = base + k * 256
            inside = token < V
            x = tl.load(target + token, mask=inside, other=NEG_INF).to(tl.float32)
            if TRUNCATE:
                x = tl.where((x >= target_threshold) | (x != x), x, NEG_INF)
            x = x * target_scale
            if DRAFT == ONE_HOT:
                q = tl.where(token == rejected, 2.0, 0.0)
            elif DRAFT == PROBABILITIES:
                q = tl.load(draft + token, mask=token < draft_end, other=0.0).to(tl.float32)
            else:
                y = tl.load(draft + token, mask=token < draft_end, other=NEG_INF).to(tl.float32)
                if TRUNCATE:
                    y = tl.where(y >= draft_threshold, y, NEG_INF)
                q = exp2(y * draft_scale - draft_lse)
            if k == 0:
                word = w0
            elif k == 1:
                word = w1
            elif k == 2:
                word = w2
            else:
                word = w3
            noise = exponential(word)
            if raw:
                key = x - tl.where(greedy, 0.0, log2(noise))
                key = tl.where(key == key, key, POS_INF)
            else:
                p = exp2(x - target_lse)
                weight = p * prefix - q
                positive = weight > 0.0
                key = tl.where(positive, weight, -noise) * reciprocal(tl.where(positive, noise, p))
            key = tl.where(inside & (key == key), key, NEG_INF)
            better = key > best
            best = tl.where(better, key, best)
            winner = tl.where(better, token, winner)
    return tl.max(ordered(best, winner), axis=0)


# --------------------------------------------------------------------------------------------------------------- kernels

# token and block rule
#
# target            [B, G+1, V] float32, bfloat16 or float16; unit stride over V, strides target_batch, target_row
# draft             [B, G, V] logits of any such type or float32 probabilities (DRAFT), or unused (ONE_HOT)
# ids               [B, G] int64, contiguous; num_draft [B] int32, how many of them count; the bonus row of request b is num_draft[b]
# temperature       [B] float32, <= 0 is greedy; draft_temperature [B] float32
# seed, position    [B] int64; position: absolute index of the first drafted token
# draft_lse         [B, G] float32 for LOGITS_LSE
# *_threshold       [B, G+1], [B, G] float32 in raw logits: an entry stays where x >= threshold (TRUNCATE)
# part              [3, B, G, S] float32; key [B, P of DRAW] int64; count [3 B + 1] int32, zero before and after
# tokens            [B, G+1] int64: accepted tokens, the next token, then -1; tau, status [B] int32
#
# ALL: one launch; the P programs of a request meet at counters between the stages. Safe where they are co-resident: P programs fit the
# device at once, and with more requests than fit, TICKET hands out program numbers in order of arrival, so the oldest unfinished request can
# always start all of its programs. Counters are set back by the last program of a request, which all others have left behind.
# STATISTICS, SURPLUS (block rule with a soft draft only), DRAW: the same work as launches that never wait for each other.


@triton.jit(do_not_specialize=["B", "G", "S", "P", "NBLK"])
def verify_kernel(
    target_ptr, draft_ptr, ids_ptr, num_draft_ptr, temperature_ptr, draft_temperature_ptr, seed_ptr, position_ptr, draft_lse_ptr,
    target_threshold_ptr, draft_threshold_ptr, part_ptr, key_ptr, count_ptr, tokens_ptr, tau_ptr, status_ptr,
    V, target_batch, target_row, draft_batch, draft_row, B, G, S, P, NBLK,
    BLOCK: tl.constexpr, VEC: tl.constexpr, TILES: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr, PP: tl.constexpr,
    DRAFT: tl.constexpr, BLOCK_RULE: tl.constexpr, TRUNCATE: tl.constexpr, STAGE: tl.constexpr, TICKET: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if TICKET:
        program = tl.atomic_add(count_ptr + 3 * B, 1, sem="relaxed")
        if program == B * P - 1:
            tl.store(count_ptr + 3 * B, 0)
    b = (program // P).to(tl.int64)
    j = program % P
    # The block rule needs the surplus of rows; a one-hot draft gives it in closed form.
    HAS_SURPLUS: tl.constexpr = BLOCK_RULE and DRAFT != ONE_HOT

    temperature = tl.load(temperature_ptr + b)
    draft_temperature = tl.load(draft_temperature_ptr + b)
    drafted = tl.load(num_draft_ptr + b)
    greedy = temperature <= 0.0
    target_scale = LOG2E / tl.where(greedy, 1.0, temperature)
    draft_scale = LOG2E / tl.where(draft_temperature <= 0.0, 1.0, draft_temperature)
    target_b = target_ptr + b * target_batch
    draft_b = draft_ptr + b * draft_batch
    plane = B * G * S
    g = j // S
    lo = (j % S) * NBLK * BLOCK
    owner = (j < G * S) & (g < drafted)  # of a split that matters
    part = part_ptr + (b * G + g) * S + j % S

    if (STAGE == ALL) | (STAGE == STATISTICS):
        if owner:
            target_threshold = 0.0
            draft_threshold = 0.0
            if TRUNCATE:
                target_threshold = tl.load(target_threshold_ptr + b * (G + 1) + g)
                draft_threshold = tl.load(draft_threshold_ptr + b * G + g)
            row_statistics(
                target_b + g.to(tl.int64) * target_row, draft_b + g.to(tl.int64) * draft_row, part, plane, V, lo, target_scale,
                draft_scale, target_threshold, draft_threshold, NBLK, greedy, BLOCK, VEC, DRAFT, TRUNCATE,
            )  # fmt: skip

    if STAGE != STATISTICS:
        seed = tl.load(seed_ptr + b)
        position = tl.load(position_ptr + b)
        ids, valid, x, y, u = drafted_tokens(
            b, target_b, draft_b, ids_ptr, seed, position, target_threshold_ptr, draft_threshold_ptr, V, G, drafted, target_row, draft_row,
            target_scale, draft_scale, GP, DRAFT, TRUNCATE,
        )  # fmt: skip
    if STAGE == ALL:
        meet(count_ptr + 3 * b, j < G * S, G * S)
    if STAGE != STATISTICS:
        test = tl.arange(0, GP)
        target_lse, draft_lse = normalisers(b, part_ptr, draft_lse_ptr, plane, G, S, drafted, GP, SP, DRAFT)
        log_ratio = log_ratios(valid, x, y, target_lse, draft_lse)
        if BLOCK_RULE:
            log_prefix = chain(log_ratio)
            prefix = tl.exp2(log_prefix)
            could_pass = (u <= prefix) & (test < drafted)  # h_i <= P_i
            undecided = (
                tl.max((could_pass & (test == drafted - 1)).to(tl.int32), axis=0) == 0
            )  # else tau = γ whatever h is

    if HAS_SURPLUS:
        if (STAGE == ALL) | (STAGE == SURPLUS):
            # Row g, behind g drafted tokens, decides test g - 1.
            wanted = tl.max((could_pass & (test == g - 1)).to(tl.int32), axis=0) > 0
            if owner & wanted & undecided & (temperature > 0.0):
                target_threshold = 0.0
                draft_threshold = 0.0
                if TRUNCATE:
                    target_threshold = tl.load(target_threshold_ptr + b * (G + 1) + g)
                    draft_threshold = tl.load(draft_threshold_ptr + b * G + g)
                mass = surplus(
                    target_b + g.to(tl.int64) * target_row, draft_b + g.to(tl.int64) * draft_row, V, lo, target_scale, draft_scale,
                    at(target_lse, g, test), at(draft_lse, g, test), at(log_prefix, g - 1, test), target_threshold, draft_threshold, NBLK,
                    BLOCK, DRAFT, TRUNCATE,
                )  # fmt: skip
                tl.store(part + 2 * plane, mass)
        if STAGE == ALL:
            meet(count_ptr + 3 * b + 1, j < G * S, G * S)

    if (STAGE == ALL) | (STAGE == DRAW):
        if greedy:
            split = tl.arange(0, SP)
            rows = (b * G + test)[:, None] * S + split[None, :]
            there = (test < drafted)[:, None] & (split < S)[None, :]
            top = tl.load(part_ptr + rows, mask=there, other=NEG_INF, cache_modifier=".cg")
            where = tl.load(part_ptr + plane + rows, mask=there, other=NOWHERE, cache_modifier=".cg")
            row_top = tl.max(top, axis=1)
            best = tl.min(tl.where((top == row_top[:, None]) & there, where, NOWHERE), axis=1)
            passed = (ids.to(tl.float32) == best) & valid
            tau = tl.min(tl.where((test < drafted) & (passed == 0), test, drafted), axis=0)
            bad = (test < drafted) & ((row_top == POS_INF) | (row_top == NEG_INF))
        else:
            bad = (test < drafted) & (((target_lse > NEG_INF) & (target_lse < POS_INF)) == 0)
            if BLOCK_RULE:
                if DRAFT == ONE_HOT:
                    # sum of max(P p - q, 0) = P (1 - p(x)), x the token drafted behind
                    following = tl.minimum(test + 1, GP - 1)
                    log_p = tl.where(valid, x - target_lse, NEG_INF)
                    mass = prefix * (1.0 - tl.exp2(tl.gather(log_p, following, 0)))
                else:
                    split = tl.arange(0, SP)
                    rows = (b * G + test + 1)[:, None] * S + split[None, :]
                    needed = could_pass & (test < tl.where(undecided, drafted - 1, 0))
                    there = needed[:, None] & (split < S)[None, :]
                    mass = tl.sum(
                        tl.load(part_ptr + 2 * plane + rows, mask=there, other=0.0, cache_modifier=".cg"), axis=1
                    )
                rest = mass + 1.0 - prefix
                h = tl.where(rest > 0.0, mass / tl.where(rest > 0.0, rest, 1.0), 1.0)
                h = tl.where(test == drafted - 1, prefix, h)
                passed = could_pass & (u <= h) & valid
                tau = tl.max(tl.where(passed, test + 1, 0), axis=0)
            else:
                passed = (u <= tl.exp2(log_ratio)) & valid
                tau = tl.min(tl.where((test < drafted) & (passed == 0), test, drafted), axis=0)
        raw = (tau == drafted) | greedy
        kept = tl.full((), 1.0, tl.float32)  # P_tau of the block rule, P_0 = 1
        if BLOCK_RULE:
            kept = tl.where(tau > 0, at(prefix, tau - 1, test), 1.0)
        row = tl.minimum(tau, G - 1)
        target_threshold = 0.0
        draft_threshold = 0.0
        if TRUNCATE:
            target_threshold = tl.load(target_threshold_ptr + b * (G + 1) + tau)
            draft_threshold = tl.load(draft_threshold_ptr + b * G + row)
        packed = race(
            target_b + tau.to(tl.int64) * target_row, draft_b + row.to(tl.int64) * draft_row, V, j, P, seed, position + tau, RACE, target_scale,
            draft_scale, at(target_lse, tau, test), at(draft_lse, tau, test), kept, target_threshold, draft_threshold,
            tl.max(tl.where(test == row, ids, -1), axis=0), raw, greedy, TILES, DRAFT, TRUNCATE,
        )  # fmt: skip
        tl.store(key_ptr + b * P + j, packed)
        tl.debug_barrier()
        if tl.atomic_add(count_ptr + 3 * b + 2, 1, sem="acq_rel", scope="gpu") == P - 1:
            share = tl.arange(0, PP)
            packed = tl.max(
                tl.load(key_ptr + b * P + share, mask=share < P, other=-9223372036854775807, cache_modifier=".cg"),
                axis=0,
            )
            out = tl.arange(0, 2 * GP)
            accepted = tl.load(ids_ptr + b * G + out, mask=out < tau, other=-1)
            token = tl.minimum(index_of(packed), V - 1).to(tl.int64)
            tl.store(
                tokens_ptr + b * (G + 1) + out,
                tl.where(out < tau, accepted, tl.where(out == tau, token, -1)),
                mask=out <= G,
            )
            tl.store(tau_ptr + b, tau)
            unusable = (tl.max(bad.to(tl.int32), axis=0) > 0) | (raw & is_unusable(packed))
            foreign = tl.max(((test < drafted) & (valid == 0)).to(tl.int32), axis=0) > 0
            tl.store(status_ptr + b, tl.where(unusable, UNUSABLE_ROW, 0) | tl.where(foreign, BAD_ID, 0))
            tl.store(count_ptr + 3 * b, 0)
            tl.store(count_ptr + 3 * b + 1, 0)
            tl.store(count_ptr + 3 * b + 2, 0)


@triton.jit
def meet(counter, arrives, everyone):
    """Wait until `everyone` has arrived: what they wrote before is visible after."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, arrives.to(tl.int32), sem="acq_rel", scope="gpu") + arrives.to(tl.int32)
    while arrived < everyone:
        arrived = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


# coupled rule, and plain sampling (G = 0): the target's own choice at every position, accepted while the draft agrees
#
# Tensors as above. R = G + 1 rows; a program owns one share of one row. key [B, R, S] int64, count [B] int32 zero before and after.


@triton.jit(do_not_specialize=["B", "G", "S"])
def choose_kernel(
    target_ptr, ids_ptr, num_draft_ptr, temperature_ptr, seed_ptr, position_ptr, target_threshold_ptr, key_ptr, count_ptr,
    tokens_ptr, tau_ptr, status_ptr, V, target_batch, target_row, B, G, S,
    TILES: tl.constexpr, RP: tl.constexpr, SP: tl.constexpr, TRUNCATE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    R = G + 1
    b = (program // (R * S)).to(tl.int64)
    r = (program // S) % R
    s = program % S
    temperature = tl.load(temperature_ptr + b)
    drafted = tl.load(num_draft_ptr + b)
    greedy = temperature <= 0.0
    scale = LOG2E / tl.where(greedy, 1.0, temperature)
    if r <= drafted:
        threshold = 0.0
        if TRUNCATE:
            threshold = tl.load(target_threshold_ptr + b * R + r)
        row = target_ptr + b * target_batch + r.to(tl.int64) * target_row
        packed = race(
            row, row, V, s, S, tl.load(seed_ptr + b), tl.load(position_ptr + b) + r, RACE, scale, scale, 0.0, 0.0, 1.0, threshold, threshold,
            -1, greedy == greedy, greedy, TILES, ONE_HOT, TRUNCATE,
        )  # fmt: skip
        tl.store(key_ptr + (b * R + r) * S + s, packed)
    tl.debug_barrier()
    if tl.atomic_add(count_ptr + b, 1, sem="acq_rel", scope="gpu") == R * S - 1:
        position = tl.arange(0, RP)
        share = tl.arange(0, SP)
        there = (position <= drafted)[:, None] & (share < S)[None, :]
        keys = (b * R + position)[:, None] * S + share[None, :]
        packed = tl.max(tl.load(key_ptr + keys, mask=there, other=-9223372036854775807, cache_modifier=".cg"), axis=1)
        choice = tl.minimum(index_of(packed), V - 1)
        ids = tl.load(ids_ptr + b * G + position, mask=position < drafted, other=-1)
        tau = tl.min(tl.where((position < drafted) & (choice.to(tl.int64) != ids), position, drafted), axis=0)
        tl.store(tokens_ptr + b * R + position, tl.where(position <= tau, choice, -1).to(tl.int64), mask=position <= G)
        tl.store(tau_ptr + b, tau)
        unusable = tl.max((is_unusable(packed) & ((position < drafted) | (position == tau))).to(tl.int32), axis=0) > 0
        foreign = tl.max(((position < drafted) & ((ids < 0) | (ids >= V))).to(tl.int32), axis=0) > 0
        tl.store(status_ptr + b, tl.where(unusable, UNUSABLE_ROW, 0) | tl.where(foreign, BAD_ID, 0))
        tl.store(count_ptr + b, 0)


# acceptance alone, from ready log-probabilities: what earlier verification kernels do, kept to be compared with them
#
# target_log_p, draft_log_p [B, G, V] float32 contiguous; ids [B, G] int64; uniforms [B, G] float32 -> accepted [B, G] bool, first [B] int32


@triton.jit
def accept_kernel(target_ptr, draft_ptr, ids_ptr, uniforms_ptr, accepted_ptr, first_ptr, G, V, GP: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    test = tl.arange(0, GP)
    there = test < G
    ids = tl.load(ids_ptr + b * G + test, mask=there, other=0)
    entry = (b * G + test) * V + ids
    ratio = tl.exp(
        tl.load(target_ptr + entry, mask=there, other=0.0) - tl.load(draft_ptr + entry, mask=there, other=0.0)
    )
    accepted = tl.load(uniforms_ptr + b * G + test, mask=there, other=1.0) < tl.minimum(ratio, 1.0)
    tl.store(accepted_ptr + b * G + test, accepted, mask=there)
    tl.store(first_ptr + b, tl.min(tl.where(there & (accepted == 0), test, G), axis=0))
