"""The row-wise steps of a layer as compiled loops: one call where torch takes a dozen.

Knows float32 and bfloat16 (as int16 bits). Does not know tensors or layers. The compiler may neither contract nor
reorder here (no fast math): every sum runs over 16 lanes by absolute index, then down a tree, so a row's bits depend on
the row alone, and are the same on every machine. A query reads its own sequence's keys and values and no others, so
what lies in a block past its last token, NaN included, reaches nobody.

Importing fails where numba is absent; torch's plain twins (`cpu.py`, `attention/paged.py`) serve there.

Legend: T tokens, N width, L leaves, H query heads, K kv heads, G = H / K, E head size, R rows, B blocks a row.
"""

import functools
from typing import Any

import numba
import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numba.extending import overload

from worker_svc.ops.attention_tiles import COUNT, EXP, LARGEST, SCORES, WEIGH_16, WEIGH_64, WIDEN
from worker_svc.ops.raw import call, pointer

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


def as_job(function: Any) -> int:
    """The address of function(arguments, chunk), both words, for `companion.run`; kept on disk where a folder can."""
    signature = numba.types.void(numba.types.int64, numba.types.int64)
    try:
        made = numba.cfunc(signature, cache=True)(function)
    except RuntimeError:
        made = numba.cfunc(signature)(function)
    _jobs.append(made)
    address: int = made.address  # type: ignore[assignment]
    return address


_jobs: list[Any] = []  # what has an address must stay


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
def _fetch(pool, table, kv, first, count, loaded, tiles):  # type: ignore[no-untyped-def]
    """loaded[:count] = keys or values of tokens first .. of one sequence, in fp32."""
    kv_heads, block_size, head_dim = pool.shape[1], pool.shape[2], pool.shape[3]
    padded = loaded.shape[1]
    bits = loaded.view(np.int32)
    j = 0
    while j < count:
        block, offset = table[(first + j) // block_size], (first + j) % block_size
        run = min(count - j, block_size - offset)
        if pool.itemsize == 2 and head_dim == padded:
            source = pool.ctypes.data + ((block * kv_heads + kv) * block_size + offset) * head_dim * 2
            call(tiles[WIDEN], source, loaded.ctypes.data + j * padded * 4, run * head_dim, 0, 0, 0)
        else:
            for i in range(run):
                _load(pool[block, kv, offset + i], loaded[j + i], bits[j + i], head_dim)
        j += run


@jit
def attend(queries, keys, values, tables, segments, window, tiles, begin_segment, end_segment, out):  # type: ignore[no-untyped-def]
    """softmax(q k^T) v for segments begin .. end - 1, queries already scaled.

    segments [S, 4]: row, first token, number of tokens, position of the first. tiles: of `attention_tiles.py`.
    """
    num_heads, head_dim = queries.shape[1], queries.shape[2]
    kv_heads = keys.shape[1]
    groups = num_heads // kv_heads
    padded = (head_dim + LANES - 1) // LANES * LANES
    rows = TILE * groups
    loaded = np.zeros((LANES, padded), np.float32)
    q = np.zeros((rows, padded), np.float32)
    scores = np.empty((rows, SPLIT), np.float32)
    total, best = np.empty(rows, np.float32), np.empty(rows, np.float32)
    weighted = np.empty((rows, padded), np.float32)
    loaded_at, q_at = np.int64(loaded.ctypes.data), np.int64(q.ctypes.data)
    scores_at, weighted_at = np.int64(scores.ctypes.data), np.int64(weighted.ctypes.data)
    lanes = np.empty(LANES, np.float32)
    pair, pair_powers = np.empty(2, np.float32), np.empty(2, np.int32)
    pair_scale = pair_powers.view(np.float32)
    pair_at = np.int64(pair.ctypes.data)
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
                        _fetch(keys, tables[r], kv, key, min(LANES, last + 1 - key), loaded, tiles)
                        for row in range(height * groups):
                            to = scores_at + (row * SPLIT + key - split) * 4
                            call(tiles[SCORES], q_at + row * padded * 4, loaded_at, padded, to, 0, 0)
                    for row in range(height * groups):
                        position = first + row // groups
                        low = max(begin, position - window + 1) if window > 0 else begin
                        high = min(end, position + 1)
                        if low >= high:
                            continue
                        start = begin - split
                        stop = (high - split + LANES - 1) // LANES * LANES
                        for j in range(start, low - split):
                            scores[row, j] = -np.inf
                        for j in range(high - split, stop):
                            scores[row, j] = -np.inf
                        call(tiles[LARGEST], scores_at + (row * SPLIT + start) * 4, stop - start, pair_at, 0, 0, 0)
                        largest = pair[0]
                        for j in range(start, stop):
                            scores[row, j] -= largest
                        call(tiles[EXP], scores_at + (row * SPLIT + start) * 4, stop - start, 0, 0, 0, 0)
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
                        _fetch(values, tables[r], kv, key, present, loaded, tiles)
                        for row in range(height * groups):
                            position = first + row // groups
                            low = max(key, position - window + 1) if window > 0 else key
                            count = min(key + present, position + 1) - low
                            if count <= 0:
                                continue
                            p = scores_at + (row * SPLIT + low - split) * 4
                            v, to = loaded_at + (low - key) * padded * 4, weighted_at + row * padded * 4
                            e = 0
                            while e + 64 <= padded:
                                call(tiles[WEIGH_64], p, count, v + e * 4, padded, to + e * 4, 0)
                                e += 64
                            while e < padded:
                                call(tiles[WEIGH_16], p, count, v + e * 4, padded, to + e * 4, 0)
                                e += 16
                for row in range(height * groups):
                    for e in range(head_dim):
                        result[e] = weighted[row, e] / total[row]
                    _store(
                        result,
                        result.view(np.int32),
                        out[token + row // groups, kv * groups + row % groups],
                        head_dim,
                    )
    loaded[0, 0] = q[0, 0] = scores[0, 0] = weighted[0, 0] = pair[0] = ZERO  # until here they are used by address


# Words of an attention job: addresses and shapes. A chunk is the segments between two of the edges.
A_QUERIES, A_OUT, A_KEYS, A_VALUES, A_TABLES, A_SEGMENTS, A_TILES, A_EDGES = range(8)
A_TOKENS, A_HEADS, A_HEAD_DIM, A_BLOCKS, A_KV_HEADS, A_BLOCK_SIZE = range(8, 14)
A_ROWS, A_ROW_BLOCKS, A_NUM_SEGMENTS, A_CHUNKS, A_WINDOW, A_WORDS = range(14, 20)


@jit
def _attend_chunk(arguments, chunk, cache_type, out_type):  # type: ignore[no-untyped-def]
    w = carray(pointer(arguments), (A_WORDS,), np.int64)
    shape = (w[A_TOKENS], w[A_HEADS], w[A_HEAD_DIM])
    pool = (w[A_BLOCKS], w[A_KV_HEADS], w[A_BLOCK_SIZE], w[A_HEAD_DIM])
    edges = carray(pointer(w[A_EDGES]), (w[A_CHUNKS] + 1,), np.int64)
    attend(
        carray(pointer(w[A_QUERIES]), shape, np.float32),
        carray(pointer(w[A_KEYS]), pool, cache_type),
        carray(pointer(w[A_VALUES]), pool, cache_type),
        carray(pointer(w[A_TABLES]), (w[A_ROWS], w[A_ROW_BLOCKS]), np.int32),
        carray(pointer(w[A_SEGMENTS]), (w[A_NUM_SEGMENTS], 4), np.int64),
        w[A_WINDOW],
        carray(pointer(w[A_TILES]), (COUNT,), np.int64),
        edges[chunk],
        edges[chunk + 1],
        carray(pointer(w[A_OUT]), shape, out_type),
    )


def _attend_half(arguments, chunk):  # type: ignore[no-untyped-def]
    _attend_chunk(arguments, chunk, np.int16, np.int16)


def _attend_single(arguments, chunk):  # type: ignore[no-untyped-def]
    _attend_chunk(arguments, chunk, np.float32, np.float32)


def _attend_half_cache(arguments, chunk):  # type: ignore[no-untyped-def]
    _attend_chunk(arguments, chunk, np.int16, np.float32)


def _attend_single_cache(arguments, chunk):  # type: ignore[no-untyped-def]
    _attend_chunk(arguments, chunk, np.float32, np.int16)


@functools.cache
def attend_job(half_cache: bool, half_out: bool) -> int:
    """The job's address for these types; compiled, or loaded from the compiler's cache, when first asked for."""
    by_type = {
        (True, True): _attend_half,
        (False, False): _attend_single,
        (True, False): _attend_half_cache,
        (False, True): _attend_single_cache,
    }
    return as_job(by_type[half_cache, half_out])
