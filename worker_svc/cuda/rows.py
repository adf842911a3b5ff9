"""Kernels of one row a program: embedding, RMSNorm, residual add, q/k norm with rotation and the cache write, SiLU.

Know rows of activations and where a token's keys and values live; nothing of batches. Invariant: block shapes and
warps of every sum depend on the model alone, so a row's sums have one tree; sums and elementwise work are in fp32, and
each result is rounded once (the residual stream is rounded after its addition, and normed from the rounded value).

Legend: T tokens, C hidden width, H query heads, K kv heads, D head width.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

WARPS = 8


@triton.jit
def inverse_rms(x, width, epsilon):
    return tl.rsqrt(tl.sum(x * x) / width + epsilon)


@triton.jit
def normed(x, weight, width, epsilon):
    return x * inverse_rms(x, width, epsilon) * weight


@triton.jit
def embed_kernel(table, token_ids, out, count_ptr, width, first_id, num_ids, BLOCK: tl.constexpr,
                 DEPENDENT: tl.constexpr):  # fmt: skip
    """Rows of a table that holds ids first_id .. first_id + num_ids; zeros for others."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0)
    if t < tl.load(count_ptr):
        c = tl.arange(0, BLOCK)
        live = c < width
        local = tl.load(token_ids + t).to(tl.int64) - first_id
        inside = (local >= 0) & (local < num_ids)
        row = tl.load(table + local * width + c, mask=live & inside, other=0.0)
        tl.store(out + t.to(tl.int64) * width + c, row, mask=live)


@triton.jit
def add_norm_kernel(x, residual, total, weight, out, count_ptr, width, epsilon, ADD: tl.constexpr,
                    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """total = residual + x, which may be either of them, and out = norm(total); without ADD out = norm(x)."""
    if DEPENDENT:
        gdc_launch_dependents()
    t = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    live = c < width
    scale = tl.load(weight + c, mask=live, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_wait()
    if t < tl.load(count_ptr):
        at = t.to(tl.int64) * width + c
        row = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
        if ADD:
            row += tl.load(residual + at, mask=live, other=0.0).to(tl.float32)
            rounded = row.to(out.dtype.element_ty)
            tl.store(total + at, rounded, mask=live)
            row = rounded.to(tl.float32)
        tl.store(out + at, normed(row, scale, width, epsilon).to(out.dtype.element_ty), mask=live)


@triton.jit
def gather_rows_kernel(x, index, out, count_ptr, width, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """out[i] = x[index[i]]."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0)
    if i < tl.load(count_ptr):
        c = tl.arange(0, BLOCK)
        live = c < width
        row = tl.load(x + tl.load(index + i).to(tl.int64) * width + c, mask=live, other=0.0)
        tl.store(out + i.to(tl.int64) * width + c, row, mask=live)


@triton.jit
def silu_mul_kernel(gate_up, out, count_ptr, width, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """out = silu(gate) * up of [gate | up] rows."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0)
    if t < tl.load(count_ptr):
        for first in range(0, width, BLOCK):
            c = first + tl.arange(0, BLOCK)
            live = c < width
            at = t.to(tl.int64) * 2 * width + c
            gate = tl.load(gate_up + at, mask=live, other=0.0).to(tl.float32)
            up = tl.load(gate_up + at + width, mask=live, other=0.0).to(tl.float32)
            to = t.to(tl.int64) * width + c
            tl.store(out + to, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=live)


@triton.jit
def _clipped(x, CLIP: tl.constexpr, clip):
    """Into -clip .. clip where CLIP; NaN stays."""
    if CLIP:
        x = tl.where(x > clip, clip, tl.where(x < -clip, -clip, x.to(tl.float32))).to(x.dtype)
    return x


@triton.jit
def _rotate_and_write(x, y, first, second, head, live, t, position, slot, cosines, sines, tables, table_stride, q_out,
                      k_cache, v_cache, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
                      PAGE: tl.constexpr):  # fmt: skip
    """Heads of token t by their number among the H + K + K: queries [x | y] rotated to q_out, keys rotated and values
    [first | second] as they are to the token's place in the cache, unless its slot is negative. Rotation pairs d with
    d + D / 2. The table is asked first: its answer takes longest."""
    written = slot >= 0
    block = tl.load(tables + tl.maximum(slot, 0) * table_stride + position // PAGE).to(tl.int64)
    HALF: tl.constexpr = D // 2
    d = tl.arange(0, HALF)
    cosine = tl.load(cosines + position.to(tl.int64) * HALF + d)[None, :]
    sine = tl.load(sines + position.to(tl.int64) * HALF + d)[None, :]
    rotated_x = tl.fma(x, cosine, -(y * sine)).to(first.dtype)
    rotated_y = tl.fma(y, cosine, x * sine).to(first.dtype)
    is_query = (head < HEADS)[:, None] & live
    to_q = q_out + t.to(tl.int64) * HEADS * D + head[:, None] * D + d[None, :]
    tl.store(to_q, rotated_x, mask=is_query)
    tl.store(to_q + HALF, rotated_y, mask=is_query)
    kv = tl.where(head < HEADS + KV_HEADS, head - HEADS, head - HEADS - KV_HEADS)
    to = ((block * KV_HEADS + kv) * PAGE + position % PAGE)[:, None] * D + d[None, :]
    is_key = ((head >= HEADS) & (head < HEADS + KV_HEADS))[:, None] & live & written
    tl.store(k_cache + to, rotated_x, mask=is_key)
    tl.store(k_cache + to + HALF, rotated_y, mask=is_key)
    is_value = (head >= HEADS + KV_HEADS)[:, None] & live & written
    tl.store(v_cache + to, first, mask=is_value)
    tl.store(v_cache + to + HALF, second, mask=is_value)


@triton.jit
def rope_write_kernel(qkv, q_weight, k_weight, cosines, sines, positions, token_slots, tables, table_stride, q_out,
                      k_cache, v_cache, count_ptr, epsilon, clip,
                      HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
                      CLIP: tl.constexpr, NORM: tl.constexpr, GROUP: tl.constexpr,
                      DEPENDENT: tl.constexpr):  # fmt: skip
    """Program (t, i): GROUP heads of token t, of the H + K + K that a qkv row holds, clipped (when CLIP); queries and
    keys are normed (when NORM) head by head. All is read at once, whether the token is there or not.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    HALF: tl.constexpr = D // 2
    d = tl.arange(0, HALF)
    at = qkv + t.to(tl.int64) * (HEADS + 2 * KV_HEADS) * D + head[:, None] * D + d[None, :]
    live = (head < HEADS + 2 * KV_HEADS)[:, None] & (d >= 0)[None, :]
    first = tl.load(at, mask=live, other=0.0)
    second = tl.load(at + HALF, mask=live, other=0.0)
    position = tl.load(positions + t)
    slot = tl.load(token_slots + t).to(tl.int64)
    if t < tl.load(count_ptr):
        first = _clipped(first, CLIP, clip)
        second = _clipped(second, CLIP, clip)
        x = first.to(tl.float32)
        y = second.to(tl.float32)
        if NORM:
            is_query = (head < HEADS)[:, None]
            square = tl.sum(x * x, 1) + tl.sum(y * y, 1)
            inverse = tl.rsqrt(square / D + epsilon)[:, None]
            low = tl.where(is_query, tl.load(q_weight + d)[None, :], tl.load(k_weight + d)[None, :]).to(tl.float32)
            high = tl.where(is_query, tl.load(q_weight + HALF + d)[None, :], tl.load(k_weight + HALF + d)[None, :])
            x = (x * inverse * low).to(first.dtype).to(tl.float32)
            y = (y * inverse * high.to(tl.float32)).to(first.dtype).to(tl.float32)
        _rotate_and_write(
            x, y, first, second, head, live, t, position, slot, cosines, sines, tables, table_stride, q_out,
            k_cache, v_cache, HEADS, KV_HEADS, D, PAGE,
        )  # fmt: skip


@triton.jit
def _adjacent_sum(values, POWER: tl.constexpr):
    """Of 2 ** POWER values: neighbours, then neighbouring pairs, and so on, as `ops/leaves.py` folds."""
    for i in tl.static_range(POWER):
        values = tl.sum(tl.reshape(values, (1 << (POWER - 1 - i), 2)), 1)
    return tl.sum(values, 0)


@triton.jit
def _sum_of_squares(at, heads, D: tl.constexpr, BLOCK_H: tl.constexpr, POWER: tl.constexpr):
    HALF: tl.constexpr = D // 2
    h = tl.arange(0, BLOCK_H)
    to = at + h[:, None] * D + tl.arange(0, HALF)[None, :]
    x = tl.load(to, mask=(h < heads)[:, None], other=0.0).to(tl.float32)
    y = tl.load(to + HALF, mask=(h < heads)[:, None], other=0.0).to(tl.float32)
    return _adjacent_sum(tl.sum(x * x, 1) + tl.sum(y * y, 1), POWER)


@triton.jit
def full_squares_kernel(qkv, squares, count_ptr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
                        BLOCK_H: tl.constexpr, POWER: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """squares [T, 2]: sums of squares of this rank's part of a token's query and key rows."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0)
    if t < tl.load(count_ptr):
        row = qkv + t.to(tl.int64) * (HEADS + 2 * KV_HEADS) * D
        tl.store(squares + 2 * t, _sum_of_squares(row, HEADS, D, BLOCK_H, POWER))
        tl.store(squares + 2 * t + 1, _sum_of_squares(row + HEADS * D, KV_HEADS, D, BLOCK_H, POWER))


@triton.jit
def full_rope_write_kernel(qkv, squares, q_weight, k_weight, cosines, sines, positions, token_slots, tables,
                           table_stride, q_out, k_cache, v_cache, count_ptr, epsilon, clip, q_width, k_width,
                           HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
                           CLIP: tl.constexpr, GIVEN: tl.constexpr, BLOCK_H: tl.constexpr, POWER: tl.constexpr,
                           DEPENDENT: tl.constexpr):  # fmt: skip
    """`rope_write_kernel` where queries and keys are normed over all heads of a token, then clipped; values are only
    clipped. Program (t, i): the queries, keys or values of token t.

    GIVEN: `squares` holds the sums over q_width and k_width columns, of which this rank has a part. The row, its
    position and its slot are read at once, whether the token is there or not; so are the norms' weights before that.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    t = tl.program_id(0)
    part = tl.program_id(1)
    heads = tl.where(part == 0, HEADS, KV_HEADS)
    start = tl.where(part == 0, 0, tl.where(part == 1, HEADS, HEADS + KV_HEADS))
    HALF: tl.constexpr = D // 2
    h = tl.arange(0, BLOCK_H)
    inner = h[:, None] * D + tl.arange(0, HALF)[None, :]
    live = (h < heads)[:, None] & (inner >= 0)
    weight = tl.where(part == 0, q_weight, k_weight) + inner
    low = tl.load(weight, mask=live & (part < 2), other=0.0).to(tl.float32)
    high = tl.load(weight + HALF, mask=live & (part < 2), other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_wait()
    row = qkv + t.to(tl.int64) * (HEADS + 2 * KV_HEADS) * D + start * D
    first = tl.load(row + inner, mask=live, other=0.0)
    second = tl.load(row + inner + HALF, mask=live, other=0.0)
    position = tl.load(positions + t)
    slot = tl.load(token_slots + t).to(tl.int64)
    if t < tl.load(count_ptr):
        x = first.to(tl.float32)
        y = second.to(tl.float32)
        if part < 2:
            if GIVEN:
                square = tl.load(squares + 2 * t + part)
            else:
                square = _adjacent_sum(tl.sum(x * x, 1) + tl.sum(y * y, 1), POWER)
            inverse = tl.rsqrt(square / tl.where(part == 0, q_width, k_width) + epsilon)
            x = (x * inverse * low).to(first.dtype).to(tl.float32)
            y = (y * inverse * high).to(first.dtype).to(tl.float32)
        _rotate_and_write(
            _clipped(x, CLIP, clip).to(first.dtype).to(tl.float32),
            _clipped(y, CLIP, clip).to(first.dtype).to(tl.float32),
            _clipped(first, CLIP, clip), _clipped(second, CLIP, clip), start + h, live, t, position, slot,
            cosines, sines, tables, table_stride, q_out, k_cache, v_cache, HEADS, KV_HEADS, D, PAGE,
        )  # fmt: skip
