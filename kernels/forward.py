"""The forward of a Llama-form model in Triton for the few rows of a drafted block: five launches a layer, nothing read by the host.

Positions come from device memory, so that one CUDA graph serves every length of text. Row m = b * R + r is row r of request b and stands at
position start[b] + shift + r. The residual stream x [M, D] is float32; products take the weights' type and add up in float32.
PyTorch references: `flashspec/models/lean.py` on a CPU, transformers' own model anywhere.

Weights are [out, in] as in torch.nn.Linear. Rows of q and k are interleaved: the two numbers that RoPE turns together lie side by side.
keys, values: [B, G, C, W]. H query heads share G heads of keys, W wide; C is the capacity of the cache. Who writes a tile of x also writes the
sum of its squares, squares [M, T], so that RMSNorm costs its reader one load.

A launch of this size is mostly waiting: for the one before it, then for memory. With PDL (programmatic dependent launch, from compute
capability 9 on) a kernel starts while its predecessor ends, asks for its weights, which no kernel writes, and only then waits for what the
predecessor wrote.
"""

import triton
import triton.language as tl
from flashspec.kernels.verify import LOG2E, NEG_INF, index_of, race

# ------------------------------------------------------------------------------------------------------------ named quantities


@triton.jit
def position_of(start_ptr, b, shift, r):
    """Absolute index of row r of request b; a text of one token has no token before it, and reads that one twice."""
    return tl.maximum(tl.load(start_ptr + b) + shift + r, 0)


@triton.jit
def token_at(place, text_ptr, drafted_ptr, length_ptr, b, C, N):
    """The token at a position of request b: committed, or one of the N drafted behind the committed ones."""
    behind = place - tl.load(length_ptr + b)
    is_drafted = (behind >= 0) & (behind < N)
    committed = tl.load(text_ptr + b.to(tl.int64) * C + tl.minimum(place, C - 1))
    return tl.where(is_drafted, tl.load(drafted_ptr + b * N + behind, mask=is_drafted, other=0), committed)


@triton.jit
def follow(PDL: tl.constexpr):
    """Wait until what earlier kernels wrote is there, and let the next kernel come up behind this one."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def ask_for(weight_ptr, n, inside, K, LINES: tl.constexpr):
    """Have the first LINES cache lines of rows n of a weight brought from memory, without waiting for them."""
    if LINES:
        k = tl.arange(0, LINES) * (128 * 8 // weight_ptr.dtype.element_ty.primitive_bitwidth)
        n, k = tl.where(inside, n, 0), tl.where(k < K, k, 0)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [(weight_ptr + n[:, None].to(tl.int64) * K + k[None, :]).to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def inverse_rms(squares_ptr, m, live, T, D, epsilon, TILES: tl.constexpr):
    """1 / root mean square of rows m of x, from the squares of its T tiles: [BLOCK_M]."""
    t = tl.arange(0, TILES)
    squares = tl.load(squares_ptr + m[:, None] * T + t[None, :], mask=live[:, None] & (t < T)[None, :], other=0.0)
    return 1.0 / tl.sqrt(tl.sum(squares, axis=1) / D + epsilon)


@triton.jit
def normalised(x_ptr, gain_ptr, m, live, k, D, scale):
    """Rows m, columns k of RMSNorm(x), float32: [BLOCK_M, BLOCK_K]."""
    x = tl.load(x_ptr + m[:, None] * D + k[None, :], mask=live[:, None] & (k < D)[None, :], other=0.0)
    gain = tl.load(gain_ptr + k, mask=k < D, other=0.0).to(tl.float32)
    return x * scale[:, None] * gain[None, :]


@triton.jit
def weights_of(weight_ptr, n, inside, k, K):
    """Rows n, columns k of a weight, transposed for a product: [BLOCK_K, BLOCK_N]."""
    return tl.load(
        weight_ptr + n[None, :].to(tl.int64) * K + k[:, None], mask=inside[None, :] & (k < K)[:, None], other=0.0
    )


@triton.jit
def turned(rows, cosine, sine, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """RoPE: neighbours of rows [ROWS, WIDTH] turned together by the angles of cosine, sine [ROWS, WIDTH / 2]."""
    even, odd = tl.split(tl.reshape(rows, [ROWS, WIDTH // 2, 2]))
    return tl.reshape(tl.join(even * cosine - odd * sine, even * sine + odd * cosine), [ROWS, WIDTH])


@triton.jit
def dot(a, b, total):
    """a [M, K] times b [K, N] on top of `total`, in b's type."""
    return tl.dot(a.to(b.dtype), b, total, input_precision="ieee")


# --------------------------------------------------------------------------------------------------------------- kernels

# x[m] = table[id of row m], squares[m] = (|x[m]|², 0, 0, …). text [B, C] int64, drafted [B, N] int64 standing behind the `length[b]`
# committed tokens. Grid: M.


@triton.jit(do_not_specialize=["N", "R", "shift", "T"])
def embed_kernel(
    text_ptr, drafted_ptr, start_ptr, length_ptr, table_ptr, x_ptr, squares_ptr, C, N, R, shift, D, T,
    BLOCK: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    m = tl.program_id(0)
    b = m // R
    id = token_at(position_of(start_ptr, b, shift, m % R), text_ptr, drafted_ptr, length_ptr, b, C, N)
    k = tl.arange(0, BLOCK)
    row = tl.load(table_ptr + id * D + k, mask=k < D, other=0.0).to(tl.float32)
    t = tl.arange(0, TILES)
    tl.store(x_ptr + m * D + k, row, mask=k < D)
    tl.store(squares_ptr + m * T + t, tl.where(t == 0, tl.sum(row * row), 0.0), mask=t < T)


# A part of one head of q, k or v for BLOCK_M rows: norm, product, RoPE; q to q [M, H, W], scaled for a softmax in base 2, k and v into the
# cache. weight [(H + 2 G) W, D]; cosine, sine [C', W/2] float32. Grid: ((H + 2 G) W / BLOCK_N, row tiles).


@triton.jit(do_not_specialize=["M", "R", "shift", "H", "G", "T"])
def qkv_kernel(
    x_ptr, squares_ptr, gain_ptr, weight_ptr, cosine_ptr, sine_ptr, start_ptr, q_ptr, keys_ptr, values_ptr, M, R, shift, D, T, H, G, C, epsilon,
    W: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LINES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) // (W // BLOCK_N)
    left = tl.program_id(0) % (W // BLOCK_N) * BLOCK_N
    column = left + tl.arange(0, BLOCK_N)
    n = head * W + column
    ask_for(weight_ptr, n, n >= 0, D, LINES)
    follow(PDL)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = m < M
    scale = inverse_rms(squares_ptr, m, live, T, D, epsilon, TILES)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in range(0, D, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        weight = weights_of(weight_ptr, n, n >= 0, k, D)
        total = dot(normalised(x_ptr, gain_ptr, m, live, k, D, scale), weight, total)
    b = m // R
    place = position_of(start_ptr, tl.where(live, b, 0), shift, m % R)
    stored = live & (place < C)
    if head < H + G:
        pair = left // 2 + tl.arange(0, BLOCK_N // 2)
        at = tl.minimum(place, C - 1)[:, None] * (W // 2) + pair[None, :]
        total = turned(total, tl.load(cosine_ptr + at), tl.load(sine_ptr + at), BLOCK_M, BLOCK_N)
    if head < H:
        q = q_ptr + (m * H + head)[:, None] * W + column[None, :]
        tl.store(q, total * (LOG2E * W**-0.5), mask=live[:, None])
    else:
        group = (head - H) % G
        slot = ((b * G + group).to(tl.int64) * C + place)[:, None] * W + column[None, :]
        if head < H + G:
            tl.store(keys_ptr + slot, total, mask=stored[:, None])
        else:
            tl.store(values_ptr + slot, total, mask=stored[:, None])


# What the rows of one group of heads attend to, attended [M, H, W] in the weights' type. Share s of a group weighs the key blocks
# s, s + SHARES, …, each row against the keys up to its own position; the share that ends last puts them together, from partial
# [M, H, SHARES, W] float32, sums of exp2(score - top) v, and state [M, H, SHARES, 2] float32, top and sum of weights. count: a zero for each
# group and row tile, before and after.
# Grid: (B * G * row tiles, SHARES).


@triton.jit(do_not_specialize=["R", "shift", "H", "G", "T"])
def attention_kernel(
    q_ptr, keys_ptr, values_ptr, start_ptr, partial_ptr, state_ptr, count_ptr, attended_ptr, R, shift, H, G, C, T,
    W: tl.constexpr, SHARED: tl.constexpr, SHARES: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    program = tl.program_id(0)
    share = tl.program_id(1)
    b = program // (G * T)
    group = (program // T) % G
    ROWS: tl.constexpr = BLOCK_Q // SHARED  # rows of a tile, each with SHARED heads
    lane = tl.arange(0, BLOCK_Q)
    first = (program % T) * ROWS
    r = first + lane // SHARED
    live = (lane < ROWS * SHARED) & (r < R)
    query = (b * R + r) * H + group * SHARED + lane % SHARED  # row of q [M H, W]
    column = tl.arange(0, W)
    q = tl.load(q_ptr + query[:, None] * W + column[None, :], mask=live[:, None], other=0.0)
    start = tl.load(start_ptr + b) + shift
    place = tl.maximum(start + r, 0)
    end = tl.minimum(tl.maximum(start + tl.minimum(R, first + ROWS), 1), C)
    cache = (b * G + group).to(tl.int64) * C
    top = tl.full([BLOCK_Q], NEG_INF, dtype=tl.float32)
    weight = tl.zeros([BLOCK_Q], dtype=tl.float32)
    total = tl.zeros([BLOCK_Q, W], dtype=tl.float32)
    for block in range(share, (end + BLOCK_N - 1) // BLOCK_N, SHARES):
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.load(keys_ptr + (cache + n)[None, :] * W + column[:, None], mask=(n < end)[None, :], other=0.0)
        v = tl.load(values_ptr + (cache + n)[:, None] * W + column[None, :], mask=(n < end)[:, None], other=0.0)
        score = tl.dot(q, k, input_precision="ieee")
        score = tl.where(n[None, :] <= place[:, None], score, NEG_INF)
        higher = tl.maximum(top, tl.max(score, axis=1))
        base = tl.where(higher == NEG_INF, 0.0, higher)
        shrink = tl.exp2(top - base)
        p = tl.exp2(score - base[:, None])
        weight = weight * shrink + tl.sum(p, axis=1)
        total = dot(p, v, total * shrink[:, None])
        top = higher
    attended = attended_ptr + query[:, None] * W + column[None, :]
    if SHARES == 1:
        tl.store(attended, total / tl.where(weight > 0.0, weight, 1.0)[:, None], mask=live[:, None])
    else:
        out = query * SHARES + share
        tl.store(partial_ptr + out[:, None] * W + column[None, :], total, mask=live[:, None])
        tl.store(state_ptr + out * 2, top, mask=live)
        tl.store(state_ptr + out * 2 + 1, weight, mask=live)
        tl.debug_barrier()
        if tl.atomic_add(count_ptr + program, 1, sem="acq_rel", scope="gpu") == SHARES - 1:
            every = query[:, None] * SHARES + tl.arange(0, SHARES)[None, :]
            tops = tl.load(state_ptr + every * 2, mask=live[:, None], other=0.0, cache_modifier=".cg")
            sums = tl.load(state_ptr + every * 2 + 1, mask=live[:, None], other=0.0, cache_modifier=".cg")
            highest = tl.max(tops, axis=1)
            mass = tl.sum(tl.exp2(tops - highest[:, None]) * sums, axis=1)
            total = tl.zeros([BLOCK_Q, W], dtype=tl.float32)
            for s in tl.static_range(SHARES):
                here = query * SHARES + s
                part = tl.load(
                    partial_ptr + here[:, None] * W + column[None, :],
                    mask=live[:, None],
                    other=0.0,
                    cache_modifier=".cg",
                )
                part_top = tl.load(state_ptr + here * 2, mask=live, other=0.0, cache_modifier=".cg")
                total += part * tl.exp2(part_top - highest)[:, None]
            tl.store(attended, total / tl.where(mass > 0.0, mass, 1.0)[:, None], mask=live[:, None])
            tl.store(count_ptr + program, 0)


# x += hidden times weight [D, F], and the squares of each tile of the new x: for what was attended to and for the MLP.
# Grid: (D / BLOCK_N, row tiles).


@triton.jit(do_not_specialize=["M", "T"])
def add_kernel(
    hidden_ptr, weight_ptr, x_ptr, squares_ptr, M, D, F, T,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ask_for(weight_ptr, n, n < D, F, LINES)
    follow(PDL)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = m < M
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in range(0, F, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        weight = weights_of(weight_ptr, n, n < D, k, F)
        hidden = tl.load(hidden_ptr + m[:, None] * F + k[None, :], mask=live[:, None] & (k < F)[None, :], other=0.0)
        total = dot(hidden, weight, total)
    place = x_ptr + m[:, None] * D + n[None, :]
    mask = live[:, None] & (n < D)[None, :]
    total += tl.load(place, mask=mask, other=0.0)
    tl.store(place, total, mask=mask)
    tl.store(squares_ptr + m * T + tl.program_id(0), tl.sum(tl.where(mask, total * total, 0.0), axis=1), mask=live)


# hidden [M, F] = silu(gate) * up of RMSNorm(x), in the weights' type; weight [2 F, D]: gate rows, then up rows. Grid: (F / BLOCK_N, row tiles).


@triton.jit(do_not_specialize=["M", "T"])
def gate_up_kernel(
    x_ptr, squares_ptr, gain_ptr, weight_ptr, hidden_ptr, M, D, F, T, epsilon,
    TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ask_for(weight_ptr, n, n < F, D, LINES)
    ask_for(weight_ptr, n + F, n < F, D, LINES)
    follow(PDL)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = m < M
    scale = inverse_rms(squares_ptr, m, live, T, D, epsilon, TILES)
    gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in range(0, D, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        gate_weight = weights_of(weight_ptr, n, n < F, k, D)
        up_weight = weights_of(weight_ptr, n + F, n < F, k, D)
        row = normalised(x_ptr, gain_ptr, m, live, k, D, scale)
        gate = dot(row, gate_weight, gate)
        up = dot(row, up_weight, up)
    hidden = gate / (1.0 + tl.exp2(-gate * LOG2E)) * up
    tl.store(hidden_ptr + m[:, None] * F + n[None, :], hidden, mask=live[:, None] & (n < F)[None, :])


# logits [B, K, V] float32 behind the last K of the R rows of each request; weight [V, D]. Grid: (V / BLOCK_N, row tiles).


@triton.jit(do_not_specialize=["rows", "R", "K", "T"])
def head_kernel(
    x_ptr, squares_ptr, gain_ptr, weight_ptr, logits_ptr, rows, R, K, D, V, T, logits_batch, logits_row, epsilon,
    TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ask_for(weight_ptr, n, n < V, D, LINES)
    follow(PDL)
    out = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = out < rows
    m = tl.where(live, out // K * R + R - K + out % K, 0)
    scale = inverse_rms(squares_ptr, m, live, T, D, epsilon, TILES)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in range(0, D, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        weight = weights_of(weight_ptr, n, n < V, k, D)
        total = dot(normalised(x_ptr, gain_ptr, m, live, k, D, scale), weight, total)
    row = (out // K).to(tl.int64) * logits_batch + (out % K) * logits_row
    tl.store(logits_ptr + row[:, None] + n[None, :], total, mask=live[:, None] & (n < V)[None, :])


# One token a request from a drafter's logits row: an exponential race with noise keyed by (seed, start + shift, purpose), or the largest
# logit where greedy. Entries stay where x >= threshold (TRUNCATE). drafted[b, index] = token. key [B, P] int64, count [B] int32 zero before
# and after. Grid: B * P.


@triton.jit(do_not_specialize=["N", "index", "shift", "purpose", "P"])
def draw_kernel(
    logits_ptr, temperature_ptr, seed_ptr, start_ptr, threshold_ptr, key_ptr, count_ptr, drafted_ptr, V, logits_batch, N, index,
    shift, purpose, P,
    TILES: tl.constexpr, SHARES: tl.constexpr, TRUNCATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    b = (tl.program_id(0) // P).to(tl.int64)
    share = tl.program_id(0) % P
    temperature = tl.load(temperature_ptr + b)
    greedy = temperature <= 0.0
    scale = LOG2E / tl.where(greedy, 1.0, temperature)
    threshold = 0.0
    if TRUNCATE:
        threshold = tl.load(threshold_ptr + b)
    row = logits_ptr + b * logits_batch
    packed = race(
        row, row, V, share, P, tl.load(seed_ptr + b), tl.load(start_ptr + b) + shift, purpose, scale, scale, 0.0, 0.0, 1.0,
        threshold, threshold,
        -1, greedy == greedy, greedy, TILES, 0, TRUNCATE,
    )  # fmt: skip
    tl.store(key_ptr + b * P + share, packed)
    tl.debug_barrier()
    if tl.atomic_add(count_ptr + b, 1, sem="acq_rel", scope="gpu") == P - 1:
        every = tl.arange(0, SHARES)
        packed = tl.max(
            tl.load(key_ptr + b * P + every, mask=every < P, other=-9223372036854775807, cache_modifier=".cg"), axis=0
        )
        tl.store(drafted_ptr + b * N + index, tl.minimum(index_of(packed), V - 1).to(tl.int64))
        tl.store(count_ptr + b, 0)


# What a verdict emits becomes text: tokens [B, N + 1] int64, tau, status [B] int32 -> text, length (where active), and one row of
# `out` [B, 2 N + 3] for the host: the drafted ids, the tokens, tau, status. Grid: B.


@triton.jit(do_not_specialize=["N"])
def commit_kernel(
    drafted_ptr, tokens_ptr, tau_ptr, status_ptr, active_ptr, text_ptr, length_ptr, out_ptr, C, N, BLOCK: tl.constexpr
):
    b = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    out = out_ptr + b * (2 * N + 3)
    tokens = tl.load(tokens_ptr + b * (N + 1) + i, mask=i <= N, other=-1)
    tau = tl.load(tau_ptr + b)
    length = tl.load(length_ptr + b)
    place = length + i
    tl.store(text_ptr + b.to(tl.int64) * C + place, tokens, mask=(i <= tau) & (place < C))
    tl.store(length_ptr + b, length + (tau + 1) * tl.load(active_ptr + b))
    tl.store(out + i, tl.load(drafted_ptr + b * N + i, mask=i < N, other=-1), mask=i < N)
    tl.store(out + N + i, tokens, mask=i <= N)
    tl.store(out + 2 * N + 1, tau.to(tl.int64))
    tl.store(out + 2 * N + 2, tl.load(status_ptr + b).to(tl.int64))
