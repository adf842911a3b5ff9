"""The noise: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    key     = seed, low word then high word
    counter = (output index, token id div 4, choice, TAG)
    word    = token id mod 4, k in [0, 2^32)
    u       = (k + 1/2) * 2^-32, and v = 1 - u is as exact; both in (0, 1)
    noise   = -log(-log(u)), the standard Gumbel

The output index counts tokens after the prompt, resumed ones included. Nothing else enters, so no batch, cut, cache,
preemption, restart or shard can change a draw.

This is the plain form; `compiled.py` runs the same integers in one loop.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

TAG = 0x4C4B5354  # "LKST": the sampler's counters; another use of the same seed takes another tag
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
LOW = 0xFFFFFFFF

# The largest standard Gumbel that a 32-bit word can give is 22.9 and the smallest -3.2: an id more than this below
# the row's maximum cannot win.
REACH = 26.1

Uint64s = NDArray[np.uint64]


def round_keys(seed: int) -> Uint64s:
    """[20] the two key words of each round, in order of use."""
    low, high = seed & LOW, (seed >> 32) & LOW
    keys = []
    for _ in range(ROUNDS):
        keys += [low, high]
        low, high = (low + WEYL[0]) & LOW, (high + WEYL[1]) & LOW
    return np.array(keys, np.uint64)


def philox(counter: Sequence[Uint64s], keys: Uint64s) -> tuple[Uint64s, Uint64s, Uint64s, Uint64s]:
    """The four words [N] of each of N counters; every word is an uint64 below 2^32."""
    a, b, c, d = counter
    first, second = (np.uint64(multiplier) for multiplier in MULTIPLIERS)
    half, low = np.uint64(32), np.uint64(LOW)
    for r in range(ROUNDS):
        p, q = first * a, second * c
        a, b, c, d = (q >> half) ^ b ^ keys[2 * r], q & low, (p >> half) ^ d ^ keys[2 * r + 1], p & low
    return a, b, c, d


def complements(keys: Uint64s, index: int, choice: int, ids: NDArray[np.integer]) -> NDArray[np.float64]:
    """v = 1 - u [N] of token ids [N], exact."""
    column = ids.astype(np.uint64)
    fill = [np.full_like(column, value) for value in (index, choice, TAG)]
    words = np.stack(philox((fill[0], column >> np.uint64(2), fill[1], fill[2]), keys))
    k = words[(column & np.uint64(3)).astype(np.intp), np.arange(len(column))]
    v: NDArray[np.float64] = (float(LOW) - k + 0.5) * 2.0**-32
    return v
