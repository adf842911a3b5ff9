"""The loops around the tiles of a product: rows laid out, leaves folded, bias, activation, rounding. Compiled by numba.

Knows one job's arguments as a flat array of words (`Word`), so that any thread can take any chunk of it. Does not know
tensors or layers. Invariant: leaves are folded in the order of `leaves.py` in fp32, and an output is rounded once.

Importing fails where numba is absent.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from worker_svc.ops.compiled import ONE, _exp, jit

LANES = 16

# Words of a job.
X, X_HALF, X_STRIDE, M, K, LEAVES = 0, 1, 2, 3, 4, 5
W, K_BYTES, PANELS, TABLE, MAX_ROWS = 6, 7, 8, 9, 10
OUT, OUT_HALF, OUT_STRIDE, OUTPUTS, MODE, BIAS = 11, 12, 13, 14, 15, 16
BLOCK_ROWS, GROUP_PANELS, GROUPS, LAID_OUT = 17, 18, 19, 20
WORDS = 21

FOLDED, APART, GATED = 0, 1, 2  # what becomes of a tile: one sum, each leaf for itself, silu(gate) * up


def _pointer_to(typing_context, address):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), generate


def _call_at(typing_context, tile, x, w, panel_bytes, k, out, row_bytes):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [word] * 6)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


_pointer: Any = intrinsic(_pointer_to)
_call_tile: Any = intrinsic(_call_at)


@jit
def _floats(address, count):  # type: ignore[no-untyped-def]
    return carray(_pointer(address), (count,), np.float32)


@jit
def _bits(address, count):  # type: ignore[no-untyped-def]
    return carray(_pointer(address), (count,), np.int32)


@jit
def _halves(address, count):  # type: ignore[no-untyped-def]
    return carray(_pointer(address), (count,), np.int16)


@jit
def _tile_heights(rows, max_rows):  # type: ignore[no-untyped-def]
    """(tiles, rows of each, how many of them have one more)."""
    tiles = (rows + max_rows - 1) // max_rows
    return tiles, rows // tiles, rows % tiles


@jit
def lay_out(job, first, rows, target):  # type: ignore[no-untyped-def]
    """Rows first .. of x into tiles of [K, height] in fp32, one after the other."""
    k, stride = job[K], job[X_STRIDE]
    tiles, height, taller = _tile_heights(rows, job[MAX_ROWS])
    floats, bits = _floats(target, rows * k), _bits(target, rows * k)
    given, given_halves = _floats(job[X], job[M] * stride), _halves(job[X], job[M] * stride)
    row = 0
    for tile in range(tiles):
        count = height + (1 if tile < taller else 0)
        at = row * k
        for r in range(count):
            source = (first + row + r) * stride
            if job[X_HALF] != 0:
                for i in range(k):
                    bits[at + i * count + r] = np.int32(given_halves[source + i]) << np.int32(16)
            else:
                for i in range(k):
                    floats[at + i * count + r] = given[source + i]
        row += count


@jit
def _fold(sums, leaves, size):  # type: ignore[no-untyped-def]
    """sums[:size] = the fold of `leaves` runs of `size` sums, in the order of leaves.py."""
    odd = leaves
    while odd % 2 == 0:
        odd //= 2
    for group in range(0, leaves, odd):
        for leaf in range(1, odd):
            for i in range(size):
                sums[group * size + i] += sums[(group + leaf) * size + i]
    step = odd
    while step < leaves:
        for group in range(0, leaves, 2 * step):
            for i in range(size):
                sums[group * size + i] += sums[(group + step) * size + i]
        step *= 2


@jit
def _round(bits, at, out, to, count):  # type: ignore[no-untyped-def]
    for j in range(count):
        word = bits[at + j]
        if (word & np.int32(0x7FFFFFFF)) > np.int32(0x7F800000):
            out[to + j] = np.int16(0x7FC0)  # a NaN stays one
        else:
            out[to + j] = np.int16((word + np.int32(0x7FFF) + ((word >> np.int32(16)) & np.int32(1))) >> np.int32(16))


@jit
def _store(job, floats, bits, at, row, column, count):  # type: ignore[no-untyped-def]
    """Sums at .. into outputs column .. of a row. Whole panels have a loop of fixed length."""
    stride = job[OUT_STRIDE]
    to = row * stride + column
    if job[OUT_HALF] != 0:
        out = _halves(job[OUT], to + count)
        if count == LANES:
            _round(bits, at, out, to, LANES)
        else:
            _round(bits, at, out, to, count)
    else:
        single = _floats(job[OUT], to + count)
        for j in range(count):
            single[to + j] = floats[at + j]


@jit
def _multiply_by_silu(sums, height, width, e, powers, scale):  # type: ignore[no-untyped-def]
    """sums[r, :16] = silu(sums[r, :16]) * sums[r, 16:32], rows of `width`."""
    for r in range(height):
        for j in range(LANES):
            e[r * LANES + j] = -sums[r * width + j]
    _exp(e, powers, scale, height * LANES)
    for r in range(height):
        for j in range(LANES):
            gate = sums[r * width + j]
            sums[r * width + j] = gate / (ONE + e[r * LANES + j]) * sums[r * width + LANES + j]


@jit
def multiply(job, chunk):  # type: ignore[no-untyped-def]
    """One block of rows by one group of panels."""
    k, leaves, mode, max_rows = job[K], job[LEAVES], job[MODE], job[MAX_ROWS]
    first = chunk // job[GROUPS] * job[BLOCK_ROWS]
    rows = min(job[BLOCK_ROWS], job[M] - first)
    begin = chunk % job[GROUPS] * job[GROUP_PANELS]
    panels = job[PANELS] // 2 if mode == GATED else job[PANELS]
    end = min(panels, begin + job[GROUP_PANELS])
    room = np.empty(1 if job[LAID_OUT] != 0 else rows * k, np.float32)
    x = job[LAID_OUT]
    if x == 0:
        x = np.int64(room.ctypes.data)
        lay_out(job, first, rows, x)
    table = carray(_pointer(job[TABLE]), (max_rows, 3), np.int64)
    tiles, height, taller = _tile_heights(rows, max_rows)
    tallest = height + (1 if taller > 0 else 0)
    wide = 0  # which of 1, 2 or 4 panels at a time every tile of this block can take
    for choice in range(1, 3):
        if table[tallest - 1, choice] != 0 and table[height - 1, choice] != 0:
            wide = choice
    if mode == GATED:
        wide = min(wide, 1)
    panel_bytes = k * job[K_BYTES]
    leaf_k = k // leaves
    sums = np.empty(leaves * tallest * 4 * LANES, np.float32)
    sums_bits, sums_at = sums.view(np.int32), np.int64(sums.ctypes.data)
    e, powers = np.empty(tallest * LANES, np.float32), np.empty(tallest * LANES, np.int32)
    scale = powers.view(np.float32)
    bias = _floats(job[BIAS], job[PANELS] * LANES)
    panel = begin
    while panel < end:
        choice = wide
        if mode != GATED:
            while choice > 0 and panel + (1 << choice) > end:
                choice -= 1
        count = 2 if mode == GATED else 1 << choice
        width = count * LANES
        w = job[W] + panel * panel_bytes
        apart = panels * panel_bytes if mode == GATED else panel_bytes
        row = 0
        for tile in range(tiles):
            tall = height + (1 if tile < taller else 0)
            size = tall * width
            for leaf in range(leaves):
                x_at = x + (row * k + leaf * leaf_k * tall) * 4
                w_at = w + leaf * leaf_k * job[K_BYTES]
                out_at = sums_at + leaf * size * 4
                if mode == GATED and choice == 0:
                    _call_tile(table[tall - 1, 0], x_at, w_at, apart, leaf_k, out_at, width * 4)
                    _call_tile(table[tall - 1, 0], x_at, w_at + apart, apart, leaf_k, out_at + LANES * 4, width * 4)
                else:
                    _call_tile(table[tall - 1, choice], x_at, w_at, apart, leaf_k, out_at, width * 4)
            if mode == GATED:
                _multiply_by_silu(sums, tall, width, e, powers, scale)
                for r in range(tall):
                    valid = min(LANES, job[OUTPUTS] - panel * LANES)
                    _store(job, sums, sums_bits, r * width, first + row + r, panel * LANES, valid)
            elif mode == APART:
                for leaf in range(leaves):
                    for r in range(tall):
                        for c in range(count):
                            valid = min(LANES, job[OUTPUTS] - (panel + c) * LANES)
                            place = leaf * job[M] + first + row + r
                            at = leaf * size + r * width + c * LANES
                            _store(job, sums, sums_bits, at, place, (panel + c) * LANES, valid)
            else:
                if leaves > 1:
                    _fold(sums, leaves, size)
                for r in range(tall):
                    if job[BIAS] != 0:
                        for j in range(width):
                            sums[r * width + j] += bias[panel * LANES + j]
                    for c in range(count):
                        valid = min(LANES, job[OUTPUTS] - (panel + c) * LANES)
                        _store(job, sums, sums_bits, r * width + c * LANES, first + row + r, (panel + c) * LANES, valid)
            row += tall
        panel += count if mode != GATED else 1
    room[0] = 0  # numba frees an array after its last use, and does not see the address


def _as_job(function: Any, signature: Any) -> Any:
    """A C function, kept on disk where a folder can hold it."""
    try:
        return numba.cfunc(signature, cache=True)(function)
    except RuntimeError:
        return numba.cfunc(signature)(function)


def _multiply(arguments, chunk):  # type: ignore[no-untyped-def]
    multiply(carray(_pointer(arguments), (WORDS,), np.int64), chunk)


multiply_job: int = _as_job(_multiply, types.void(types.int64, types.int64)).address
