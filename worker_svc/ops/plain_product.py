"""The plain twin of `product.py`: the same expression, one k after the other, in numpy. Slow, and exact.

Knows how a fused multiply-add in fp32 is had without one: the product of two fp32 numbers is exact in fp64; the sum is
rounded to odd there, from where rounding to fp32 is as if there had been no step between (Boldo and Melquiond 2008).
"""

import numpy as np
from numpy.typing import NDArray

from worker_svc.ops.leaves import fold

Floats = NDArray[np.float32]


def fma(x: Floats, y: Floats, z: Floats) -> Floats:
    """x * y + z, rounded once."""
    product, addend = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)  # exact (Knuth's two-sum)
    even = (total.view(np.int64) & 1) == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    odd = np.where((error != 0) & even & np.isfinite(total), np.nextafter(total, toward), total)
    return odd.astype(np.float32)


def leaf_sums(x_MK: Floats, w_NK: Floats, leaves: int) -> list[Floats]:
    """[M, N] for each leaf."""
    width = x_MK.shape[1] // leaves
    sums = []
    for leaf in range(leaves):
        acc = np.zeros((len(x_MK), len(w_NK)), np.float32)
        for k in range(leaf * width, (leaf + 1) * width):
            x, w = np.broadcast_arrays(x_MK[:, k : k + 1], w_NK[:, k])
            acc = fma(x, w, acc)
        sums.append(acc)
    return sums


def product(x_MK: Floats, w_NK: Floats, bias_N: Floats | None = None, leaves: int = 1) -> Floats:
    total: Floats = fold(leaf_sums(x_MK, w_NK, leaves))  # type: ignore[arg-type,assignment]
    return total if bias_N is None else total + bias_N
