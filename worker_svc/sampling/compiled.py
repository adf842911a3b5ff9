"""The loops of `plain.py` in one pass each, compiled by numba and kept on disk; importing fails where numba is absent.

The compiler may neither contract nor reorder here (no fast math), so `exp_blocks` gives the plain twin's bits. The race
tightens its bound as it walks and may therefore name other candidates than the twin; the winner is among both.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from protos.step import Float32s, Floats, Int32s
from worker_svc.sampling import plain
from worker_svc.sampling.philox import LOW, MULTIPLIERS, ROUNDS, TAG, Uint64s
from worker_svc.sampling.plain import BLOCK, HALF, LN2_HIGH, LN2_LOW, LOG2E, LOWEST, ONE, P0, P1, P2, P3, P4, P5, ZERO


def jit(function: Callable[..., Any]) -> Any:
    """Compiled at its first call, or loaded from the cache; anew in each process where no folder can hold one."""
    try:
        return numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:
        return numba.njit(nogil=True, error_model="numpy")(function)


FIRST, SECOND = (np.uint64(m) for m in MULTIPLIERS)
MASK, WORD, TAG_WORD = np.uint64(LOW), np.uint64(32), np.uint64(TAG)
COUNTERS = BLOCK // 4  # a counter gives the words of four ids
UNIT = np.float32(2.0**-32)
SLACK = np.float32(plain.SLACK)
NO_BOUND = np.float32(3e38)


@jit
def _exp_blocks(x_V, offsets_B, temperature, e_BK, sums_B):  # type: ignore[no-untyped-def]
    t = np.empty(BLOCK, np.float32)
    scale = np.empty(BLOCK, np.int32)
    scale_as_float = scale.view(np.float32)
    for b in range(len(e_BK)):
        first = b * BLOCK
        size = min(BLOCK, len(x_V) - first)
        x = x_V[first : first + size]
        offset = offsets_B[b]
        for i in range(size):
            t[i] = (x[i] - offset) / temperature
        for i in range(size, BLOCK):
            t[i] = -np.inf
        e = e_BK[b]
        for i in range(BLOCK):
            clamped = max(t[i], LOWEST)
            n = np.floor(clamped * LOG2E + HALF)
            r = (clamped - n * LN2_HIGH) - n * LN2_LOW
            y = ((((P0 * r + P1) * r + P2) * r + P3) * r + P4) * r + P5
            e[i] = (y * (r * r) + r) + ONE
            scale[i] = (np.int32(n) + 127) << 23
        for i in range(BLOCK):
            e[i] = ZERO if t[i] < LOWEST else e[i] * scale_as_float[i]
        n = BLOCK // 2
        for i in range(n):
            t[i] = e[i] + e[i + n]
        while n > 1:
            n //= 2
            for i in range(n):
                t[i] = t[i] + t[i + n]
        sums_B[b] = t[0]


def exp_blocks(x_V: Floats, offsets_B: Floats, temperature: float, e_BK: Floats, sums_B: Floats) -> None:
    if x_V.dtype == np.float32:
        _exp_blocks(x_V, offsets_B, np.float32(temperature), e_BK, sums_B)
    else:
        plain.exp_blocks(x_V, offsets_B, temperature, e_BK, sums_B)


@jit
def _words(keys, index, choice, first, count, words):  # type: ignore[no-untyped-def]
    """words[j, i] = 2^32 - 1 - word j of counter first + i, for i < count: v = (words + 1/2) * 2^-32."""
    for i in range(count):
        a, b, c, d = np.uint64(index), np.uint64(first + i), np.uint64(choice), TAG_WORD
        for r in range(ROUNDS):
            p, q = FIRST * a, SECOND * c
            a, b, c, d = (q >> WORD) ^ b ^ keys[2 * r], q & MASK, (p >> WORD) ^ d ^ keys[2 * r + 1], p & MASK
        words[0, i], words[1, i], words[2, i], words[3, i] = MASK - a, MASK - b, MASK - c, MASK - d


@jit
def _race(keys, index, choice, e_BK, factors_B, room):  # type: ignore[no-untyped-def]
    words = np.empty((4, COUNTERS), np.uint32)
    bound = NO_BOUND
    count = 0
    for b in range(len(e_BK)):
        factor = factors_B[b]
        e = e_BK[b]
        _words(keys, index, choice, b * COUNTERS, COUNTERS, words)
        scaled = bound * factor
        for i in range(COUNTERS):
            hit = False
            for j in range(4):
                if (np.float32(words[j, i]) + HALF) * UNIT <= scaled * e[4 * i + j]:
                    hit = True
            if hit:
                for j in range(4):
                    w = e[4 * i + j] * factor
                    v = (np.float32(words[j, i]) + HALF) * UNIT
                    if w > 0 and v <= bound * w:
                        room[count] = b * BLOCK + 4 * i + j
                        count += 1
                        if v < HALF:
                            bound = min(bound, SLACK * (v + v * v) / w)
                            scaled = bound * factor
    return count


def race(keys: Uint64s, index: int, choice: int, e_BK: Float32s, factors_B: Float32s, room: Int32s) -> Int32s:
    return room[: _race(keys, index, choice, e_BK, factors_B, room)].copy()


@jit
def _race_ids(keys, index, choice, ids, weights, room):  # type: ignore[no-untyped-def]
    words = np.empty((4, 1), np.uint32)
    bound = NO_BOUND
    count = 0
    for i in range(len(ids)):
        _words(keys, index, choice, ids[i] >> 2, 1, words)
        v = (np.float32(words[ids[i] & 3, 0]) + HALF) * UNIT
        w = weights[i]
        if w > 0 and v <= bound * w:
            room[count] = i
            count += 1
            if v < HALF:
                bound = min(bound, SLACK * (v + v * v) / w)
    return count


def race_ids(keys: Uint64s, index: int, choice: int, ids: Int32s, weights: Float32s, room: Int32s) -> Int32s:
    return room[: _race_ids(keys, index, choice, ids, weights, room)].copy()


@jit
def _complements(keys, index, choice, ids, v):  # type: ignore[no-untyped-def]
    words = np.empty((4, 1), np.uint32)
    for i in range(len(ids)):
        _words(keys, index, choice, ids[i] >> 2, 1, words)
        v[i] = (words[ids[i] & 3, 0] + 0.5) * 2.0**-32


def complements(keys: Uint64s, index: int, choice: int, ids: Int32s) -> NDArray[np.float64]:
    v = np.empty(len(ids))
    _complements(keys, index, choice, ids, v)
    return v


def words(keys: Uint64s, index: int, choice: int, first: int, count: int) -> NDArray[np.uint32]:
    """[4, count] the words of counters first .., as the race draws them; tests compare them with the plain form."""
    result = np.empty((4, count), np.uint32)
    _words(keys, index, choice, first, count, result)
    return ~result
