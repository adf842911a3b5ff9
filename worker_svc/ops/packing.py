"""Rows of a weight turned into panels, where they lie: what a product's weight goes through once, at load.

Knows how 16 rows become a panel and how panels are shared out among threads. Does not know products. Invariant: bits
are moved, none are changed. Importing fails where numba is absent.

Legend: P panels, K inputs.
"""

from array import array

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from worker_svc.ops.companion import companion
from worker_svc.ops.compiled import as_job, jit
from worker_svc.ops.raw import pointer
from worker_svc.ops.tiles import LANES

RUN = 16  # words of a row that are turned at a time: a cache line of 4-byte ones
CHUNK_ITEMS = 1 << 20

# Words of a job.
AT, K, PANELS, CHUNK_PANELS, HALF = 0, 1, 2, 3, 4
WORDS = 5


def turn_into_panels(rows_NK: Tensor) -> Tensor:
    """[P, K, 16] in the memory of `rows_NK` [16 P, K], which is contiguous and means nothing afterwards."""
    k = rows_NK.shape[1]
    panels = len(rows_NK) // LANES
    if panels and k:
        each = max(1, CHUNK_ITEMS // (LANES * k))
        job = array("q", (rows_NK.data_ptr(), k, panels, each, rows_NK.dtype == torch.bfloat16))
        companion().run(_turn_job, job.buffer_info()[0], -(-panels // each), torch.get_num_threads())
    return rows_NK.view(panels, k, LANES)


@jit
def _turn(panel, k, room, tile):  # type: ignore[no-untyped-def]
    """One panel's 16 rows of k, flat. `tile`: short enough runs of all rows that a cache holds them whatever k is."""
    room[:] = panel
    whole = k // RUN * RUN
    for begin in range(0, whole, RUN):
        for lane in range(LANES):
            for i in range(RUN):
                tile[lane * RUN + i] = room[lane * k + begin + i]
        for i in range(RUN):
            for lane in range(LANES):
                panel[(begin + i) * LANES + lane] = tile[lane * RUN + i]
    for i in range(whole, k):
        for lane in range(LANES):
            panel[i * LANES + lane] = room[lane * k + i]


@jit
def _turn_pairs(panel, pairs, room, tile):  # type: ignore[no-untyped-def]
    """The same for 2-byte values, two neighbours in a word: two words read and written turn four values."""
    room[:] = panel
    low, high, sixteen = np.uint32(0xFFFF), np.uint32(0xFFFF0000), np.uint32(16)
    half = LANES // 2
    whole = pairs // RUN * RUN
    for begin in range(0, whole, RUN):
        for lane in range(LANES):
            for i in range(RUN):
                tile[lane * RUN + i] = room[lane * pairs + begin + i]
        for i in range(RUN):
            at = (begin + i) * LANES
            for p in range(half):
                a, b = tile[2 * p * RUN + i], tile[(2 * p + 1) * RUN + i]
                panel[at + p] = (a & low) | (b << sixteen)
                panel[at + half + p] = (a >> sixteen) | (b & high)
    for i in range(whole, pairs):
        for p in range(half):
            a, b = room[2 * p * pairs + i], room[(2 * p + 1) * pairs + i]
            panel[i * LANES + p] = (a & low) | (b << sixteen)
            panel[i * LANES + half + p] = (a >> sixteen) | (b & high)


def _turn_chunk(arguments, chunk):  # type: ignore[no-untyped-def]
    job = carray(pointer(arguments), (WORDS,), np.int64)
    k = job[K]
    begin, end = chunk * job[CHUNK_PANELS], min(job[PANELS], (chunk + 1) * job[CHUNK_PANELS])
    if job[HALF] != 0 and k % 2 == 0:
        pairs = carray(pointer(job[AT]), (job[PANELS], LANES * k // 2), np.uint32)
        room, tile = np.empty(LANES * k // 2, np.uint32), np.empty(LANES * RUN, np.uint32)
        for panel in range(begin, end):
            _turn_pairs(pairs[panel], k // 2, room, tile)
    elif job[HALF] != 0:
        halves = carray(pointer(job[AT]), (job[PANELS], LANES * k), np.int16)
        room16, tile16 = np.empty(LANES * k, np.int16), np.empty(LANES * RUN, np.int16)
        for panel in range(begin, end):
            _turn(halves[panel], k, room16, tile16)
    else:
        singles = carray(pointer(job[AT]), (job[PANELS], LANES * k), np.int32)
        room32, tile32 = np.empty(LANES * k, np.int32), np.empty(LANES * RUN, np.int32)
        for panel in range(begin, end):
            _turn(singles[panel], k, room32, tile32)


_turn_job: int = as_job(_turn_chunk)
