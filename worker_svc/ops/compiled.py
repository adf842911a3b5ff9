"""The row-wise steps of a layer as compiled loops: one call where torch takes a dozen.

Knows float32 and bfloat16 (as int16 bits). Does not know tensors or layers. The compiler may neither contract nor
reorder here (no fast math): every sum runs over 16 lanes by absolute index, then down a tree, so a row's bits depend on
the row alone, and are the same on every machine. A query reads its own sequence's keys and values and no others, so
what lies in a block past its last token, NaN included, reaches nobody.

Importing fails where numba is absent; torch's plain twins (`cpu.py`, `attention/paged.py`) serve there.

Legend: T tokens, N width, L leaves, H query heads, K kv heads, G = H / K, E head size, R rows, B blocks a row.
"""

from typing import Any

import numba
import numpy as np
from numba.extending import overload

LANES = 16
SPLIT = 256
TILE = 8  # queries of one row that share a pass over its keys
LOWEST, HIGHEST = np.float32(-87.0), np.float32(88.0)
LOG2E, LN2_HIGH, LN2_LOW = np.float32(1.442695041), np.float32(0.693359375), np.float32(-2.12194440e-4)
P0, P1, P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
P3, P4, P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
ONE, ZERO = np.float32(1), np.float32(0)


# Sixteen sums kept in scalars become one register only if the compiler may pack straight-line code, which numba leaves
# off: attention is three times slower without. Packing changes no order, hence no bit.
numba.config.SLP_VECTORIZE = 1  # type: ignore[attr-defined]


def jit(function: Any) -> Any:
    """Compiled at its first call, or loaded from the cache where a folder can hold one."""
    try:
        return numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:
        return numba.njit(nogil=True, error_model="numpy")(function)


def _load(source: Any, target: Any, target_bits: Any, count: int) -> None:
    """target[:count] = source[:count] in float32, whatever the source is."""
    raise NotImplementedError  # compiled code only


def _store(values: Any, bits: Any, target: Any, count: int) -> None:
    """target[:count] = values[:count], rounded to nearest, ties to even, where the target is bfloat16."""
    raise NotImplementedError  # compiled code only


@overload(_load)
def _load_by_type(source, target, target_bits, count):  # type: ignore[no-untyped-def]
    def single(source, target, target_bits, count):  # type: ignore[no-untyped-def]
        for i in range(count):
            target[i] = source[i]

    def half(source, target, target_bits, count):  # type: ignore[no-untyped-def]
        for i in range(count):
            target_bits[i] = np.int32(source[i]) << np.int32(16)

    return half if source.dtype == numba.types.int16 else single


@overload(_store)
def _store_by_type(values, bits, target, count):  # type: ignore[no-untyped-def]
    def single(values, bits, target, count):  # type: ignore[no-untyped-def]
        for i in range(count):
            target[i] = values[i]

    def half(values, bits, target, count):  # type: ignore[no-untyped-def]
        for i in range(count):
            word = bits[i]
            target[i] = np.int16((word + np.int32(0x7FFF) + ((word >> np.int32(16)) & np.int32(1))) >> np.int32(16))

    return half if target.dtype == numba.types.int16 else single


@jit
def _exp(x, powers, powers_as_float, count):  # type: ignore[no-untyped-def]
    """exp of x[:count] in place, within [-87, 88] (Cephes' expf, without contraction)."""
    for i in range(count):
        clamped = min(max(x[i], LOWEST), HIGHEST)
        n = np.floor(clamped * LOG2E + np.float32(0.5))
        r = clamped - n * LN2_HIGH - n * LN2_LOW
        y = ((((P0 * r + P1) * r + P2) * r + P3) * r + P4) * r + P5
        x[i] = y * (r * r) + r + ONE if x[i] == x[i] else x[i]  # a NaN stays one
        powers[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
    for i in range(count):
        x[i] *= powers_as_float[i]


@jit
def _tree(lanes):  # type: ignore[no-untyped-def]
    a, b = lanes[0] + lanes[8], lanes[4] + lanes[12]
    c, d = lanes[1] + lanes[9], lanes[5] + lanes[13]
    e, f = lanes[2] + lanes[10], lanes[6] + lanes[14]
    g, h = lanes[3] + lanes[11], lanes[7] + lanes[15]
    return ((a + b) + (e + f)) + ((c + d) + (g + h))


@jit
def _dot_lanes(q, k, chunks, out):  # type: ignore[no-untyped-def]
    """out[l] = sum over c ascending of q[c, l] * k[c, l]. Sixteen scalars, so that no store stands between the sums."""
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = a8 = a9 = a10 = a11 = a12 = a13 = a14 = a15 = ZERO
    for c in range(chunks):
        a0 += q[c, 0] * k[c, 0]
        a1 += q[c, 1] * k[c, 1]
        a2 += q[c, 2] * k[c, 2]
        a3 += q[c, 3] * k[c, 3]
        a4 += q[c, 4] * k[c, 4]
        a5 += q[c, 5] * k[c, 5]
        a6 += q[c, 6] * k[c, 6]
        a7 += q[c, 7] * k[c, 7]
        a8 += q[c, 8] * k[c, 8]
        a9 += q[c, 9] * k[c, 9]
        a10 += q[c, 10] * k[c, 10]
        a11 += q[c, 11] * k[c, 11]
        a12 += q[c, 12] * k[c, 12]
        a13 += q[c, 13] * k[c, 13]
        a14 += q[c, 14] * k[c, 14]
        a15 += q[c, 15] * k[c, 15]
    out[0] = a0
    out[1] = a1
    out[2] = a2
    out[3] = a3
    out[4] = a4
    out[5] = a5
    out[6] = a6
    out[7] = a7
    out[8] = a8
    out[9] = a9
    out[10] = a10
    out[11] = a11
    out[12] = a12
    out[13] = a13
    out[14] = a14
    out[15] = a15


@jit
def _weigh(weights, begin, low, high, v, c, total):  # type: ignore[no-untyped-def]
    """total[c, l] += weights[begin + j] * v[j, c, l] for j from low to high - 1, ascending."""
    a0 = total[c, 0]
    a1 = total[c, 1]
    a2 = total[c, 2]
    a3 = total[c, 3]
    a4 = total[c, 4]
    a5 = total[c, 5]
    a6 = total[c, 6]
    a7 = total[c, 7]
    a8 = total[c, 8]
    a9 = total[c, 9]
    a10 = total[c, 10]
    a11 = total[c, 11]
    a12 = total[c, 12]
    a13 = total[c, 13]
    a14 = total[c, 14]
    a15 = total[c, 15]
    for j in range(low, high):
        w = weights[begin + j]
        a0 += w * v[j, c, 0]
        a1 += w * v[j, c, 1]
        a2 += w * v[j, c, 2]
        a3 += w * v[j, c, 3]
        a4 += w * v[j, c, 4]
        a5 += w * v[j, c, 5]
        a6 += w * v[j, c, 6]
        a7 += w * v[j, c, 7]
        a8 += w * v[j, c, 8]
        a9 += w * v[j, c, 9]
        a10 += w * v[j, c, 10]
        a11 += w * v[j, c, 11]
        a12 += w * v[j, c, 12]
        a13 += w * v[j, c, 13]
        a14 += w * v[j, c, 14]
        a15 += w * v[j, c, 15]
    total[c, 0] = a0
    total[c, 1] = a1
    total[c, 2] = a2
    total[c, 3] = a3
    total[c, 4] = a4
    total[c, 5] = a5
    total[c, 6] = a6
    total[c, 7] = a7
    total[c, 8] = a8
    total[c, 9] = a9
    total[c, 10] = a10
    total[c, 11] = a11
    total[c, 12] = a12
    total[c, 13] = a13
    total[c, 14] = a14
    total[c, 15] = a15


@jit
def _square_sum(x, count, lanes):  # type: ignore[no-untyped-def]
    for lane in range(LANES):
        lanes[lane] = ZERO
    whole = count // LANES * LANES
    for begin in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] += x[begin + lane] * x[begin + lane]
    for i in range(whole, count):
        lanes[i - whole] += x[i] * x[i]
    return _tree(lanes)


@jit
def _norm_row(x, weight, eps, count, lanes):  # type: ignore[no-untyped-def]
    scale = ONE / np.sqrt(_square_sum(x, count, lanes) / np.float32(count) + eps)
    for i in range(count):
        x[i] = x[i] * scale * weight[i]


@jit
def add_norm(leaves, residual, weight, eps, new_residual, normed):  # type: ignore[no-untyped-def]
    count_leaves = len(leaves)
    tokens, width = residual.shape
    odd = count_leaves
    while odd > 0 and odd % 2 == 0:
        odd //= 2
    groups = count_leaves // odd if odd else 0
    sums = np.empty((max(groups, 1), width), np.float32)
    x, w, lanes = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(LANES, np.float32)
    bits = x.view(np.int32)
    _load(weight, w, w.view(np.int32), width)
    for t in range(tokens):
        for group in range(groups):
            _load(leaves[group * odd, t], sums[group], sums[group].view(np.int32), width)
            for leaf in range(1, odd):
                _load(leaves[group * odd + leaf, t], x, bits, width)
                for i in range(width):
                    sums[group, i] += x[i]
        step = 1
        while step < groups:
            for group in range(0, groups, 2 * step):
                for i in range(width):
                    sums[group, i] += sums[group + step, i]
            step *= 2
        _load(residual[t], x, bits, width)
        if groups:
            # the sum is rounded once before it is added, as every other path does
            _store(sums[0], sums[0].view(np.int32), new_residual[t], width)
            _load(new_residual[t], sums[0], sums[0].view(np.int32), width)
            for i in range(width):
                x[i] += sums[0, i]
            _store(x, bits, new_residual[t], width)
            _load(new_residual[t], x, bits, width)
        _norm_row(x, w, eps, width, lanes)
        _store(x, bits, normed[t], width)


@jit
def silu_mul(gate_up, out):  # type: ignore[no-untyped-def]
    tokens, width = out.shape
    gate, up, e = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    powers = np.empty(width, np.int32)
    scale = powers.view(np.float32)
    for t in range(tokens):
        _load(gate_up[t], gate, gate.view(np.int32), width)
        _load(gate_up[t, width:], up, up.view(np.int32), width)
        for i in range(width):
            e[i] = -gate[i]
        _exp(e, powers, scale, width)
        for i in range(width):
            e[i] = gate[i] / (ONE + e[i]) * up[i]
        _store(e, e.view(np.int32), out[t], width)


@jit
def rope_write(  # type: ignore[no-untyped-def]
    qkv, num_heads, head_dim, query_norm, key_norm, normed, eps, clip, cos, sin, positions, places, scale,
    keys, values, queries,
):  # fmt: skip
    """places[t]: the token's place in the pool (block * block_size + offset), -1: not written."""
    tokens = len(qkv)
    kv_heads, block_size = keys.shape[1], keys.shape[2]
    half = head_dim // 2
    x, turned = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
    bits, turned_bits, lanes = x.view(np.int32), turned.view(np.int32), np.empty(LANES, np.float32)
    wq, wk = np.ones(head_dim, np.float32), np.ones(head_dim, np.float32)
    if normed:
        _load(query_norm, wq, wq.view(np.int32), head_dim)
        _load(key_norm, wk, wk.view(np.int32), head_dim)
    for t in range(tokens):
        position, place = positions[t], places[t]
        block, offset = place // block_size, place % block_size
        for head in range(num_heads + 2 * kv_heads):
            if head >= num_heads and place < 0:
                continue
            _load(qkv[t, head * head_dim :], x, bits, head_dim)
            if clip > ZERO:
                for i in range(head_dim):
                    x[i] = min(max(x[i], -clip), clip)
            if head >= num_heads + kv_heads:
                _store(x, bits, values[block, head - num_heads - kv_heads, offset], head_dim)
                continue
            if normed:
                _norm_row(x, wq if head < num_heads else wk, eps, head_dim, lanes)
            for i in range(half):
                turned[i] = x[i] * cos[position, i] - x[i + half] * sin[position, i]
                turned[i + half] = x[i + half] * cos[position, i] + x[i] * sin[position, i]
            if head < num_heads:
                for i in range(head_dim):
                    queries[t, head, i] = turned[i] * scale
            else:
                _store(turned, turned_bits, keys[block, head - num_heads, offset], head_dim)


@jit
def attend(queries, keys, values, tables, segments, window, begin_segment, end_segment, out):  # type: ignore[no-untyped-def]
    """softmax(q k^T) v for segments begin .. end - 1, queries already scaled.

    segments [S, 4]: row, first token, number of tokens, position of the first.
    """
    num_heads, head_dim = queries.shape[1], queries.shape[2]
    kv_heads, block_size = keys.shape[1], keys.shape[2]
    groups = num_heads // kv_heads
    padded = (head_dim + LANES - 1) // LANES * LANES
    rows, chunks = TILE * groups, padded // LANES
    loaded = np.zeros((LANES, padded), np.float32)
    loaded_bits = loaded.view(np.int32)
    q = np.zeros((rows, padded), np.float32)
    scores = np.empty((rows, SPLIT), np.float32)
    total, best = np.empty(rows, np.float32), np.empty(rows, np.float32)
    weighted = np.empty((rows, padded), np.float32)
    q_chunks, loaded_chunks = q.reshape(rows, chunks, LANES), loaded.reshape(LANES, chunks, LANES)
    weighted_chunks = weighted.reshape(rows, chunks, LANES)
    lanes = np.empty(LANES, np.float32)
    powers = np.empty(SPLIT, np.int32)
    scale = powers.view(np.float32)
    pair, pair_powers = np.empty(2, np.float32), np.empty(2, np.int32)
    pair_scale = pair_powers.view(np.float32)
    result = np.empty(head_dim, np.float32)
    for segment in range(begin_segment, end_segment):
        r, new = segments[segment, 0], segments[segment, 2]
        for tile in range(0, new, TILE):
            height = min(TILE, new - tile)
            first = segments[segment, 3] + tile
            token = segments[segment, 1] + tile
            last = first + height - 1
            lowest = max(0, first - window + 1) if window > 0 else 0
            for kv in range(kv_heads):
                for i in range(height):
                    for g in range(groups):
                        for e in range(head_dim):
                            q[i * groups + g, e] = queries[token + i, kv * groups + g, e]
                        total[i * groups + g] = ZERO
                for split in range(lowest // SPLIT * SPLIT, last + 1, SPLIT):
                    begin = max(split, lowest // LANES * LANES)
                    end = min(split + SPLIT, last + 1)
                    for key in range(begin, end, LANES):
                        present = min(LANES, last + 1 - key)
                        for j in range(present):
                            block = tables[r, (key + j) // block_size]
                            _load(keys[block, kv, (key + j) % block_size], loaded[j], loaded_bits[j], head_dim)
                        at = key - split
                        for row in range(height * groups):
                            for j in range(LANES):
                                _dot_lanes(q_chunks[row], loaded_chunks[j], chunks, lanes)
                                scores[row, at + j] = _tree(lanes)
                    for row in range(height * groups):
                        position = first + row // groups
                        low = max(begin, position - window + 1) if window > 0 else begin
                        high = min(end, position + 1)
                        if low >= high:
                            continue
                        largest = scores[row, low - split]
                        for j in range(low - split + 1, high - split):
                            largest = max(largest, scores[row, j])
                        start = begin - split
                        stop = (high - split + LANES - 1) // LANES * LANES
                        for j in range(start, stop):
                            scores[row, j] -= largest
                        _exp(scores[row, start:stop], powers, scale, stop - start)
                        for j in range(start, low - split):
                            scores[row, j] = ZERO
                        for j in range(high - split, stop):
                            scores[row, j] = ZERO
                        for lane in range(LANES):
                            lanes[lane] = ZERO
                        for j in range(start, stop, LANES):
                            for lane in range(LANES):
                                lanes[lane] += scores[row, j + lane]
                        sum_here = _tree(lanes)
                        if total[row] == ZERO:
                            total[row], best[row] = sum_here, largest
                            pair[0], pair[1] = ZERO, ONE
                            for e in range(padded):
                                weighted[row, e] = ZERO
                        else:
                            top = max(best[row], largest)
                            pair[0], pair[1] = best[row] - top, largest - top
                            _exp(pair, pair_powers, pair_scale, 2)
                            total[row] = total[row] * pair[0] + sum_here * pair[1]
                            best[row] = top
                            for e in range(padded):
                                weighted[row, e] *= pair[0]
                            for j in range(start, stop):
                                scores[row, j] *= pair[1]
                    for key in range(begin, end, LANES):
                        present = min(LANES, last + 1 - key)
                        for j in range(present):
                            block = tables[r, (key + j) // block_size]
                            _load(values[block, kv, (key + j) % block_size], loaded[j], loaded_bits[j], head_dim)
                        for row in range(height * groups):
                            position = first + row // groups
                            low = max(key, position - window + 1) if window > 0 else key
                            high = min(key + present, position + 1)
                            for c in range(chunks):
                                _weigh(
                                    scores[row], key - split, low - key, high - key, loaded_chunks, c,
                                    weighted_chunks[row],
                                )  # fmt: skip
                for row in range(height * groups):
                    for e in range(head_dim):
                        result[e] = weighted[row, e] / total[row]
                    _store(
                        result,
                        result.view(np.int32),
                        out[token + row // groups, kv * groups + row % groups],
                        head_dim,
                    )
