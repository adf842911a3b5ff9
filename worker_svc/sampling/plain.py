"""The loops over a whole vocabulary in numpy, plainly; `compiled.py` holds the same in one pass, with the same bits.

The exponential is spelled out in single-precision multiplications and additions, so that no vector width and no library
version enters it; the rest is integers, comparisons, and sums in a stated order. In double precision (models run in
fp64, which tests do) numpy's own exponential stands in.
"""

from typing import cast

import numpy as np

from protos.step import Float32s, Floats, Int32s
from worker_svc.sampling.philox import Uint64s, complements

BLOCK = 1024

# exp(x) = 2^n * exp(r), r = x - n log 2 in two parts. The polynomial on [-log(2)/2, log(2)/2] is that of the Cephes
# library (expf): below 2 units in the last place.
LOG2E = np.float32(1.44269504088896341)
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(-2.12194440e-4)
P0 = np.float32(1.9875691500e-4)
P1 = np.float32(1.3981999507e-3)
P2 = np.float32(8.3334519073e-3)
P3 = np.float32(4.1665795894e-2)
P4 = np.float32(1.6666665459e-1)
P5 = np.float32(5.0000001201e-1)
LOWEST = np.float32(-87.0)  # below this the result is 0 rather than denormal
ZERO, ONE, HALF = np.float32(0), np.float32(1), np.float32(0.5)

SLACK = 1.001  # of the race's bound: its weights are single precision, the draw's scores double


def exp_single(x: Float32s) -> Float32s:
    """exp of x <= 0; -inf gives 0."""
    clamped = np.maximum(x, LOWEST)
    n = np.floor(clamped * LOG2E + HALF)
    r = (clamped - n * LN2_HIGH) - n * LN2_LOW
    y = ((((P0 * r + P1) * r + P2) * r + P3) * r + P4) * r + P5
    y = (y * (r * r) + r) + ONE
    scale = ((n.astype(np.int32) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.where(x < LOWEST, ZERO, y * scale)


def fold(values: Floats) -> Floats:
    """Sums [...] over the last axis, a power of two long: the upper half is added to the lower, repeatedly."""
    n = values.shape[-1]
    while n > 1:
        n //= 2
        values = values[..., :n] + values[..., n : 2 * n]
    first: Floats = values[..., 0]
    return first


def exp_blocks(x_V: Floats, offsets_B: Floats, temperature: float, e_BK: Floats, sums_B: Floats) -> None:
    """e[b, i] = exp((x - offset of its block) / temperature), 0 past the end, and the sum of each block by `fold`.

    Args:
        x_V: contiguous logits without NaN; blocks are cut at multiples of 1024.
        offsets_B: finite, at least the maximum of their block.
        e_BK, sums_B: written. Everything is in the dtype of the logits.
    """
    whole = len(x_V) // BLOCK
    e_BK[:whole] = x_V[: whole * BLOCK].reshape(whole, BLOCK)
    if whole < len(e_BK):
        rest = len(x_V) - whole * BLOCK
        e_BK[whole, :rest] = x_V[whole * BLOCK :]
        e_BK[whole, rest:] = -np.inf
    e_BK -= offsets_B[:, None]
    e_BK /= e_BK.dtype.type(temperature)
    e_BK[:] = exp_single(cast(Float32s, e_BK)) if e_BK.dtype == np.float32 else np.exp(e_BK)
    sums_B[:] = fold(e_BK)


def race(keys: Uint64s, index: int, choice: int, e_BK: Float32s, factors_B: Float32s, room: Int32s) -> Int32s:
    """Ids that may win the draw, ascending; the winner is among them.

    The id of the largest (logit/T + Gumbel) is the one of the smallest E/w for E = -log(u). With v = 1 - u,
    v <= E for every u and E <= v + v^2 for v < 1/2: so few ids need a logarithm, and none of the others can win.

    Args:
        e_BK, factors_B: the weight w of id 1024 b + i is e[b, i] * factors[b], in [0, 1]; 0 cannot be drawn.
        room: [at least B * 1024] scratch.
    """
    weights = (e_BK * factors_B[:, None]).ravel()
    ids = np.flatnonzero(weights > 0).astype(np.int32)
    return ids[race_ids(keys, index, choice, ids, weights[ids], room)]


def race_ids(keys: Uint64s, index: int, choice: int, ids: Int32s, weights: Float32s, room: Int32s) -> Int32s:
    """The same among `ids`, with their weights: ascending places in `ids`. room: [at least len(ids)] scratch."""
    v, w = complements(keys, index, choice, ids), weights.astype(np.float64)
    live = w > 0
    bound = np.divide(v + v * v, w, out=np.full_like(v, np.inf), where=live & (v < 0.5)).min(initial=np.inf)
    return np.flatnonzero(live & (v <= min(SLACK * bound, 1e300) * w)).astype(np.int32)
