"""The one log-sum-exp: over blocks of 1024 global ids, folded as a fixed tree. Every reported probability uses it.

A block's maximum and the sum of its exponentials (in the dtype of the logits, added as a balanced tree of 1024 leaves)
depend on that block alone. Blocks are then folded in double precision, again as a balanced tree, over the *global*
block number. So a vocabulary shard of whole blocks can hand over two numbers a block and the whole has the same bits.

    B blocks, K = 1024 ids of a block, V vocabulary
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from protos.step import Float32s, Floats, Int32s
from worker_svc.sampling import kernels, plain
from worker_svc.sampling.kernels import BLOCK

if TYPE_CHECKING:  # who samples at the scheduler has no need of it
    import torch

Logits: TypeAlias = "torch.Tensor | Floats"


def host_table(logits: Logits) -> Floats:
    """Logits [rows, columns] as a contiguous array on the host; not copied where they are one."""
    if not isinstance(logits, np.ndarray):
        logits = logits.detach().cpu().numpy()
    return np.ascontiguousarray(logits)


@dataclass(frozen=True, eq=False, slots=True)
class LogSumExp:
    """log(sum(exp(x / T))) as maximum / T + log_sum; log_prob(x) is one logit's log_softmax(x / T)."""

    maximum: float
    log_sum: float
    temperature: float

    def log_prob(self, logit: float) -> float:
        return (float(logit) - self.maximum) / self.temperature - self.log_sum

    def log_probs(self, logits: Floats) -> Float32s:
        """The same for many logits [N]; elementwise, so one alone gives the same bits."""
        wide = logits.astype(np.float64)
        return ((wide - self.maximum) / self.temperature - self.log_sum).astype(np.float32)


def block_maxima(x_V: Floats) -> Floats:
    """[B] the maximum of each block; NaN where a block holds one."""
    whole = len(x_V) // BLOCK
    maxima = np.empty(-(-len(x_V) // BLOCK), x_V.dtype)
    np.maximum.reduce(x_V[: whole * BLOCK].reshape(whole, BLOCK), axis=1, out=maxima[:whole])
    if whole < len(maxima):
        maxima[whole] = x_V[whole * BLOCK :].max()
    return maxima


class Blocks:
    """Room for one row's exponentials; made once a call and reused row by row.

    After `fill(x, maxima, T)`: w[b, i] = e_BK[b, i] * factors_B[b] is exp((x - row maximum) / T).
    """

    def __init__(self, vocab_size: int, dtype: np.dtype[np.floating]) -> None:
        num_blocks = -(-vocab_size // BLOCK)
        self.e_BK = np.empty((num_blocks, BLOCK), dtype)
        self.sums_B = np.empty(num_blocks, dtype)
        self.factors_B: Float32s = np.empty(num_blocks, np.float32)
        self.room: Int32s = np.empty(num_blocks * BLOCK, np.int32)

    def fill(self, x_V: Floats, maxima_B: Floats, temperature: float) -> LogSumExp:
        """Args: maxima_B: of the blocks of x_V, at least one of them finite, none NaN or +inf."""
        offsets_B = np.where(np.isneginf(maxima_B), 0, maxima_B).astype(maxima_B.dtype)
        kernels.exp_blocks(x_V, offsets_B, temperature, self.e_BK, self.sums_B)
        return self._fold(maxima_B, temperature)

    def _fold(self, maxima_B: Floats, temperature: float) -> LogSumExp:
        result, factors = fold_blocks(maxima_B, self.sums_B, temperature)
        self.factors_B[:] = factors
        return result


def fold_blocks(maxima_B: Floats, sums_B: Floats, temperature: float) -> tuple[LogSumExp, NDArray[np.float64]]:
    """All blocks of a vocabulary to its log-sum-exp, and the factors [B] that bring each to the common maximum."""
    maximum = float(maxima_B.max())
    factors = np.exp((maxima_B.astype(np.float64) - maximum) / temperature)
    leaves = np.zeros(1 << max(len(sums_B) - 1, 0).bit_length())
    leaves[: len(sums_B)] = sums_B * factors
    return LogSumExp(maximum, math.log(float(plain.fold(leaves))), temperature), factors
