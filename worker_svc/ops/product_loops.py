"""The loops around the tiles of a product: rows laid out, leaves folded, bias, activation, rounding. Compiled by numba.

Knows one job's arguments as a flat array of words (`Word`), so that any thread can take any chunk of it. Does not know
tensors or layers. Invariant: leaves are folded in the order of `leaves.py` in fp32, and an output is rounded once.

Importing fails where numba is absent.
"""

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from worker_svc.ops.compiled import ONE, as_job, jit
from worker_svc.ops.edges import ADD, COPY, EXP, LAY, LAY_HALF, ROUND, SIZE
from worker_svc.ops.raw import call, pointer

LANES = 16

# Words of a job.
X, X_HALF, X_STRIDE, M, K, LEAVES = 0, 1, 2, 3, 4, 5
W, K_BYTES, PANELS, TABLE, MAX_ROWS = 6, 7, 8, 9, 10
OUT, OUT_HALF, OUT_STRIDE, OUTPUTS, MODE, BIAS = 11, 12, 13, 14, 15, 16
BLOCK_ROWS, GROUP_PANELS, GROUPS, LAID_OUT, EDGES = 17, 18, 19, 20, 21
WORDS = 22

FOLDED, APART, GATED = 0, 1, 2  # what becomes of a tile: one sum, each leaf for itself, silu(gate) * up


@jit
def _floats(address, count):  # type: ignore[no-untyped-def]
    return carray(pointer(address), (count,), np.float32)


@jit
def _halves(address, count):  # type: ignore[no-untyped-def]
    return carray(pointer(address), (count,), np.int16)


@jit
def _tile_heights(rows, max_rows):  # type: ignore[no-untyped-def]
    """(tiles, rows of each, how many of them have one more)."""
    tiles = (rows + max_rows - 1) // max_rows
    return tiles, rows // tiles, rows % tiles


@jit
def _lay_out(job, first, rows, target):  # type: ignore[no-untyped-def]
    """Rows first .. of x into tiles of [K, height] in fp32, one after the other."""
    k, row_bytes = job[K], job[X_STRIDE] * (2 if job[X_HALF] != 0 else 4)
    edges = carray(pointer(job[EDGES]), (SIZE,), np.int64)
    which = LAY_HALF if job[X_HALF] != 0 else LAY
    tiles, height, taller = _tile_heights(rows, job[MAX_ROWS])
    row = 0
    for tile in range(tiles):
        count = height + (1 if tile < taller else 0)
        source, to = job[X] + (first + row) * row_bytes, target + row * k * 4
        call(edges[which + count - 1], source, row_bytes, k, to, 0, 0)
        row += count


@jit
def lay_out(arguments):  # type: ignore[no-untyped-def]
    """All rows of a job, to where it says that they are."""
    job = carray(pointer(arguments), (WORDS,), np.int64)
    _lay_out(job, 0, job[M], job[LAID_OUT])


@jit
def _fold(sums, leaves, size, add):  # type: ignore[no-untyped-def]
    """sums[:size] = the fold of `leaves` runs of `size` sums, in the order of leaves.py. `sums`, `add`: addresses."""
    odd = leaves
    while odd % 2 == 0:
        odd //= 2
    for group in range(0, leaves, odd):
        for leaf in range(1, odd):
            call(add, sums + group * size * 4, sums + (group + leaf) * size * 4, size, 0, 0, 0)
    step = odd
    while step < leaves:
        for group in range(0, leaves, 2 * step):
            call(add, sums + group * size * 4, sums + (group + step) * size * 4, size, 0, 0, 0)
        step *= 2


@jit
def _store_part(job, sums, width, bias, rows, first, column, count):  # type: ignore[no-untyped-def]
    """Fewer outputs than a panel has, by way of whole ones."""
    whole = np.empty(LANES, np.float32)
    half = whole.view(np.int16)
    edges = carray(pointer(job[EDGES]), (SIZE,), np.int64)
    rounded = job[OUT_HALF] != 0
    to = np.int64(whole.ctypes.data)  # `whole` is read below, so it stands
    single_out = _floats(job[OUT], 1)
    half_out = _halves(job[OUT], 1)
    for r in range(rows):
        call(edges[ROUND if rounded else COPY], sums + r * width * 4, 0, bias, to, 0, 1)
        place = (first + r) * job[OUT_STRIDE] + column
        for j in range(count):
            if rounded:
                half_out[place + j] = half[j]
            else:
                single_out[place + j] = whole[j]


@jit
def _store(job, sums, width, rows, first, panel):  # type: ignore[no-untyped-def]
    """One panel's sums of some rows, [rows, width] at the address, to the outputs of rows first .."""
    column = panel * LANES
    bias = job[BIAS] + column * 4 if job[BIAS] != 0 else np.int64(0)
    count = min(LANES, job[OUTPUTS] - column)
    if count < LANES:
        _store_part(job, sums, width, bias, rows, first, column, count)
        return
    edges = carray(pointer(job[EDGES]), (SIZE,), np.int64)
    rounded = job[OUT_HALF] != 0
    item = 2 if rounded else 4
    out = job[OUT] + (first * job[OUT_STRIDE] + column) * item
    call(edges[ROUND if rounded else COPY], sums, width * 4, bias, out, job[OUT_STRIDE] * item, rows)


@jit
def _multiply_by_silu(sums, height, width, e, exp):  # type: ignore[no-untyped-def]
    """sums[r, :16] = silu(sums[r, :16]) * sums[r, 16:32], rows of `width`."""
    for r in range(height):
        for j in range(LANES):
            e[r * LANES + j] = -sums[r * width + j]
    call(exp, np.int64(e.ctypes.data), height * LANES, 0, 0, 0, 0)
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
        _lay_out(job, first, rows, x)
    table = carray(pointer(job[TABLE]), (max_rows, 3), np.int64)
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
    sums_at = np.int64(sums.ctypes.data)
    e = np.empty(tallest * LANES, np.float32)
    edges = carray(pointer(job[EDGES]), (SIZE,), np.int64)
    add, exp = edges[ADD], edges[EXP]
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
                    call(table[tall - 1, 0], x_at, w_at, apart, leaf_k, out_at, width * 4)
                    call(table[tall - 1, 0], x_at, w_at + apart, apart, leaf_k, out_at + LANES * 4, width * 4)
                else:
                    call(table[tall - 1, choice], x_at, w_at, apart, leaf_k, out_at, width * 4)
            if mode == GATED:
                _multiply_by_silu(sums, tall, width, e, exp)
                _store(job, sums_at, width, tall, first + row, panel)
            elif mode == APART:
                for leaf in range(leaves):
                    for c in range(count):
                        at = sums_at + (leaf * size + c * LANES) * 4
                        _store(job, at, width, tall, leaf * job[M] + first + row, panel + c)
            else:
                if leaves > 1:
                    _fold(sums_at, leaves, size, add)
                for c in range(count):
                    _store(job, sums_at + c * LANES * 4, width, tall, first + row, panel + c)
            row += tall
        panel += count if mode != GATED else 1
    room[0] = sums[0] = 0  # numba frees an array after its last use, and does not see what uses the address


def _multiply(arguments, chunk):  # type: ignore[no-untyped-def]
    multiply(carray(pointer(arguments), (WORDS,), np.int64), chunk)


multiply_job: int = as_job(_multiply)
