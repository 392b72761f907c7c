"""The forward of a narrow model in Triton, for the one or two rows that a drafter reads at a time: two launches a layer.

A step of a small drafter is a chain of launches that each wait longer than they compute. Where a whole row of x fits a program, the chain can
be short: a program redoes what its neighbours do as well, and what one layer's programs would have to add up is left in parts to whoever
reads it next. Attention is one launch from x to the output product, for that product is linear in what was attended to; the MLP is another.

As in `forward.py`, row m = b * R + r is row r of request b, at position start[b] + shift + r; weights are [out, in], rows of q and k
interleaved; keys, values: [B, G, C, W]; x is float32. There are at most ROWS rows, the least that a product on tensor cores takes.

x                  [M, D] before attention, middle [M, D] behind it, before the MLP
parts              [M, H, S, D] float32: what share s of the keys adds to x through head h, were there no other shares
state              [M, H, S, 2] float32: largest score of a share in base 2, and its sum of exp2(score - largest)
slices             [M, P, D] float32: what slice p of the MLP's inner width adds to x
"""

import triton
import triton.language as tl
from flashspec.kernels.forward import dot, follow, position_of, token_at, turned, weights_of
from flashspec.kernels.verify import LOG2E, NEG_INF

ROWS = tl.constexpr(16)

# ------------------------------------------------------------------------------------------------------------ named quantities


@triton.jit
def behind_attention(x_ptr, parts_ptr, state_ptr, m, d, D, H, HEADS: tl.constexpr, SHARES: tl.constexpr):
    """Row m of x and what its heads attended to: [BLOCK_D]. The shares of a head weigh what they hold of its softmax."""
    part = tl.arange(0, HEADS * SHARES)
    there = part < H * SHARES
    at = m * H * SHARES + part
    rows = parts_ptr + at[:, None] * D + d[None, :]
    added = tl.load(rows, mask=there[:, None] & (d < D)[None, :], other=0.0)
    top = tl.reshape(tl.load(state_ptr + at * 2, mask=there, other=0.0), [HEADS, SHARES])
    weight = tl.reshape(tl.load(state_ptr + at * 2 + 1, mask=there, other=0.0), [HEADS, SHARES])
    weight = weight * tl.exp2(top - tl.max(top, axis=1)[:, None])
    total = tl.sum(weight, axis=1)
    weight = tl.reshape(weight / tl.where(total > 0.0, total, 1.0)[:, None], [HEADS * SHARES])
    return tl.load(x_ptr + m * D + d, mask=d < D, other=0.0) + tl.sum(added * weight[:, None], axis=0)


@triton.jit
def behind_mlp(middle_ptr, slices_ptr, m, d, D, P, SLICES: tl.constexpr):
    """Row m of x behind an MLP, the sum of its P slices and what stood before them: [BLOCK_D]."""
    p = tl.arange(0, SLICES)
    rows = slices_ptr + (m * P + p)[:, None] * D + d[None, :]
    added = tl.load(rows, mask=(p < P)[:, None] & (d < D)[None, :], other=0.0)
    return tl.load(middle_ptr + m * D + d, mask=d < D, other=0.0) + tl.sum(added, axis=0)


@triton.jit
def put(x, i, row):
    """x with row i replaced: [ROWS, BLOCK_D]."""
    return tl.where((tl.arange(0, ROWS) == i)[:, None], row[None, :], x)


@triton.jit
def normalised(x, gain, D, epsilon):
    """RMSNorm of rows x [ROWS, BLOCK_D], whose columns from D on are zero."""
    return x * (1.0 / tl.sqrt(tl.sum(x * x, axis=1) / D + epsilon))[:, None] * gain[None, :]


@triton.jit
def cached(keys_ptr, values_ptr, first, old, W: tl.constexpr, BLOCK_N: tl.constexpr):
    """The block of keys and values from position `first` on, of the `old` ones in the cache: [W, BLOCK_N], [BLOCK_N, W]."""
    n = first + tl.arange(0, BLOCK_N)
    w = tl.arange(0, W)
    keys = tl.load(keys_ptr + n[None, :] * W + w[:, None], mask=(n < old)[None, :], other=0.0)
    return keys, tl.load(values_ptr + n[:, None] * W + w[None, :], mask=(n < old)[:, None], other=0.0)


@triton.jit
def attend(q, k, v, seen, top, weight, total):
    """Online softmax: running maximum, sum of weights and weighted sum of values, with the keys that are `seen`."""
    score = tl.where(seen, tl.dot(q, k, input_precision="ieee"), NEG_INF)
    higher = tl.maximum(top, tl.max(score, axis=1))
    base = tl.where(higher == NEG_INF, 0.0, higher)
    shrink = tl.exp2(top - base)
    p = tl.exp2(score - base[:, None])
    return higher, weight * shrink + tl.sum(p, axis=1), dot(p, v, total * shrink[:, None])


# --------------------------------------------------------------------------------------------------------------- kernels

# Attention of one head, over one share of the keys: from x to parts, state and (first program) x itself. Share 0 also attends to the new
# rows, whose keys and values it computes and, for the first head of a group, stores. FIRST: x is read from the table [V, D] of embeddings,
# ids from text [B, C] and drafted [B, N] int64; else from middle and slices. qkv [(H + 2 G) W, D]; projection [D, H W]; cosine, sine float32
# [C', W/2]. Grid: (B * H, SHARES).


@triton.jit(do_not_specialize=["N", "R", "shift", "H", "G", "P"])
def attention_kernel(
    text_ptr, drafted_ptr, start_ptr, length_ptr, table_ptr, middle_ptr, slices_ptr, x_ptr, gain_ptr, qkv_ptr, projection_ptr,
    cosine_ptr, sine_ptr, keys_ptr, values_ptr, parts_ptr, state_ptr, C, N, R, shift, D, H, G, P, epsilon,
    W: tl.constexpr, BLOCK_D: tl.constexpr, SLICES: tl.constexpr, SHARED: tl.constexpr, SHARES: tl.constexpr, BLOCK_N: tl.constexpr,
    FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) // H
    head = tl.program_id(0) % H
    share = tl.program_id(1)
    group = head // SHARED
    new = tl.where(share == 0, R, 0)  # rows whose keys this program computes
    d = tl.arange(0, BLOCK_D)
    w = tl.arange(0, W)
    computed = w < W * new
    q_weight = weights_of(qkv_ptr, head * W + w, w < W, d, D)
    k_weight = weights_of(qkv_ptr, (H + group) * W + w, computed, d, D)
    v_weight = weights_of(qkv_ptr, (H + G + group) * W + w, computed, d, D)
    projection = tl.load(
        projection_ptr + d[None, :] * (H * W) + head * W + w[:, None], mask=(d < D)[None, :], other=0.0
    )
    gain = tl.load(gain_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    follow(PDL)

    old = tl.minimum(tl.maximum(tl.load(start_ptr + b) + shift, 0), C)
    cache = (b * G + group).to(tl.int64) * C * W
    first = share * BLOCK_N
    old_k, old_v = cached(keys_ptr + cache, values_ptr + cache, first, old, W, BLOCK_N)
    x = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    for i in range(R):
        if FIRST:
            id = token_at(position_of(start_ptr, b, shift, i), text_ptr, drafted_ptr, length_ptr, b, C, N)
            row = tl.load(table_ptr + id * D + d, mask=d < D, other=0.0).to(tl.float32)
        else:
            row = behind_mlp(middle_ptr, slices_ptr, b * R + i, d, D, P, SLICES)
        x = put(x, i, row)
    r = tl.arange(0, ROWS)
    m = b * R + r
    live = r < R
    rows = live[:, None] & (d < D)[None, :]
    first_program = (head == 0) & (share == 0)
    tl.store(x_ptr + m[:, None] * D + d[None, :], x, mask=rows & (d < tl.where(first_program, D, 0))[None, :])

    normal = normalised(x, gain, D, epsilon)
    place = position_of(start_ptr, b, shift, r)
    at = tl.minimum(place, C - 1)[:, None] * (W // 2) + tl.arange(0, W // 2)[None, :]
    cosine, sine = tl.load(cosine_ptr + at), tl.load(sine_ptr + at)
    nothing = tl.zeros([ROWS, W], dtype=tl.float32)
    kind = q_weight.dtype
    q = (turned(dot(normal, q_weight, nothing), cosine, sine, ROWS, W) * (LOG2E * W**-0.5)).to(kind)
    k = turned(dot(normal, k_weight, nothing), cosine, sine, ROWS, W).to(kind)
    v = dot(normal, v_weight, nothing).to(kind)
    slot = cache + place[:, None] * W + w[None, :]
    stored = (live & (place < tl.where((share == 0) & (head % SHARED == 0), C, 0)))[:, None]
    tl.store(keys_ptr + slot, k, mask=stored)
    tl.store(values_ptr + slot, v, mask=stored)

    top = tl.full([ROWS], NEG_INF, dtype=tl.float32)
    weight = tl.zeros([ROWS], dtype=tl.float32)
    before = (r < new)[None, :] & (r[None, :] <= r[:, None])
    top, weight, total = attend(q, tl.trans(k), v, before, top, weight, nothing)
    while first < old:
        seen = (first + tl.arange(0, BLOCK_N) < old)[None, :]
        top, weight, total = attend(q, old_k, old_v, seen, top, weight, total)
        first += SHARES * BLOCK_N
        old_k, old_v = cached(keys_ptr + cache, values_ptr + cache, first, old, W, BLOCK_N)
    attended = total / tl.where(weight > 0.0, weight, 1.0)[:, None]
    part = (m * H + head) * SHARES + share
    added = dot(attended, projection, tl.zeros([ROWS, BLOCK_D], dtype=tl.float32))
    tl.store(parts_ptr + part[:, None] * D + d[None, :], added, mask=rows)
    tl.store(state_ptr + part * 2, top, mask=live)
    tl.store(state_ptr + part * 2 + 1, weight, mask=live)


# A slice of an MLP, BLOCK_F of its F inner columns: from x, parts and state to slices and (first program) middle.
# gate_up [2 F, D]: gate rows, then up rows; down [D, F]. Grid: F / BLOCK_F.


@triton.jit(do_not_specialize=["M", "H", "P"])
def mlp_kernel(
    x_ptr, parts_ptr, state_ptr, middle_ptr, gain_ptr, gate_up_ptr, down_ptr, slices_ptr, M, D, F, H, P, epsilon,
    BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr, HEADS: tl.constexpr, SHARES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    f = p * BLOCK_F + tl.arange(0, BLOCK_F)
    gate_weight = weights_of(gate_up_ptr, f, f < F, d, D)
    up_weight = weights_of(gate_up_ptr, F + f, f < F, d, D)
    down_weight = tl.load(down_ptr + d[None, :] * F + f[:, None], mask=(d < D)[None, :] & (f < F)[:, None], other=0.0)
    gain = tl.load(gain_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    follow(PDL)

    x = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    for m in range(M):
        x = put(x, m, behind_attention(x_ptr, parts_ptr, state_ptr, m, d, D, H, HEADS, SHARES))
    m = tl.arange(0, ROWS)
    rows = (m < M)[:, None] & (d < D)[None, :]
    tl.store(middle_ptr + m[:, None] * D + d[None, :], x, mask=rows & (d < tl.where(p == 0, D, 0))[None, :])
    normal = normalised(x, gain, D, epsilon)
    nothing = tl.zeros([ROWS, BLOCK_F], dtype=tl.float32)
    gate = dot(normal, gate_weight, nothing)
    hidden = gate / (1.0 + tl.exp2(-gate * LOG2E)) * dot(normal, up_weight, nothing)
    added = dot(hidden, down_weight, tl.zeros([ROWS, BLOCK_D], dtype=tl.float32))
    tl.store(slices_ptr + (m * P + p)[:, None] * D + d[None, :], added, mask=rows)


# logits [B, K, V] float32 behind the last K of the R rows of each request, from middle and slices; weight [V, D]. Grid: V / BLOCK_V.


@triton.jit(do_not_specialize=["rows", "R", "K", "P"])
def head_kernel(
    middle_ptr, slices_ptr, gain_ptr, weight_ptr, logits_ptr, rows, R, K, D, V, P, logits_batch, logits_row, epsilon,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, SLICES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    n = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    weight = weights_of(weight_ptr, n, n < V, d, D)
    gain = tl.load(gain_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    follow(PDL)
    x = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    for i in range(rows):
        x = put(x, i, behind_mlp(middle_ptr, slices_ptr, i // K * R + R - K + i % K, d, D, P, SLICES))
    logits = dot(normalised(x, gain, D, epsilon), weight, tl.zeros([ROWS, BLOCK_V], dtype=tl.float32))
    i = tl.arange(0, ROWS)
    row = (i // K).to(tl.int64) * logits_batch + (i % K) * logits_row
    tl.store(logits_ptr + row[:, None] + n[None, :], logits, mask=(i < rows)[:, None] & (n < V)[None, :])
