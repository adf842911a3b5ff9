"""Log probabilities of given tokens: of whole rows, or from vocabulary shards that exchange a few numbers a row.

`shard_scores` runs on each rank over its own columns (whole 1024-id blocks; a rank may have none), `fold_scores` over
what all ranks found, in rank order. `score` is both in one place; the bits are the same for every cut. Who asks for the
largest logit alone takes `shard_largest` and `fold_largest`: no exponential is computed.

    P rows (positions), L columns of a shard, B blocks, k alternatives
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protos.step import Float32s, Floats, Int32s
from worker_svc.sampling.kernels import BLOCK
from worker_svc.sampling.logsumexp import Blocks, Logits, block_maxima, fold_blocks, host_table
from worker_svc.sampling.selection import order, top


@dataclass(frozen=True, eq=False, slots=True)
class ShardScores:
    """What one shard knows of P rows, in the dtype of the logits; NaN rows keep their NaN in `maxima`.

    targets is the target's logit where the shard owns it, else -inf (as for a target whose logit is -inf).
    top_ids, top_logits [P, k]: the shard's first k by (logit descending, id ascending); -1 and -inf past its end.
    """

    maxima_PB: Floats
    sums_PB: Floats
    targets_P: Floats
    top_ids: Int32s
    top_logits: Floats


def shard_scores(
    logits_PL: Logits, first_id: int, target_ids: Int32s, k: int = 0, temperature: float = 1.0
) -> ShardScores:
    """Args:
    logits_PL: this shard's columns, ids first_id .. first_id + L - 1; first_id is a multiple of 1024, L may be 0.
    target_ids: [P] global ids.
    k: alternatives wanted; 1 finds the argmax.
    """
    table = host_table(logits_PL)
    rows, columns = table.shape
    assert first_id % BLOCK == 0
    num_blocks = -(-columns // BLOCK)
    maxima, sums = np.empty((rows, num_blocks), table.dtype), np.zeros((rows, num_blocks), table.dtype)
    targets = np.full(rows, -np.inf, table.dtype)
    owned = (target_ids >= first_id) & (target_ids < first_id + columns)
    targets[owned] = table[owned, target_ids[owned] - first_id]
    top_ids, top_logits = np.full((rows, k), -1, np.int32), np.full((rows, k), -np.inf, table.dtype)
    blocks = Blocks(columns, table.dtype)
    for p in range(rows if columns else 0):
        maxima[p] = block_maxima(table[p])
        largest = maxima[p].max()
        if math.isnan(largest) or largest == math.inf:
            continue
        if largest > -math.inf:
            blocks.fill(table[p], maxima[p], temperature)
            sums[p] = blocks.sums_B
        if k:
            ids = top(table[p], k)
            top_ids[p, : len(ids)] = ids + first_id
            top_logits[p, : len(ids)] = table[p, ids]
    return ShardScores(maxima, sums, targets, top_ids, top_logits)


def fold_scores(
    shards: Sequence[ShardScores], temperature: float = 1.0
) -> tuple[Float32s | NDArray[np.float64], Int32s, Floats]:
    """(logprobs [P], alternative ids [P, k], their logprobs [P, k]) of all shards in rank order.

    In float32 for float32 logits, in float64 for float64 ones; NaN for a row that held a NaN or +inf, or only -inf.
    """
    maxima = np.concatenate([shard.maxima_PB for shard in shards], axis=1)
    sums = np.concatenate([shard.sums_PB for shard in shards], axis=1)
    targets = np.max([shard.targets_P for shard in shards], axis=0)
    ids = np.concatenate([shard.top_ids for shard in shards], axis=1)
    logits = np.concatenate([shard.top_logits for shard in shards], axis=1)
    rows, k = len(maxima), shards[0].top_ids.shape[1]
    logprobs = np.full(rows, np.nan, maxima.dtype)
    top_ids, top_logprobs = np.full((rows, k), -1, np.int32), np.full((rows, k), np.nan, maxima.dtype)
    for p in range(rows):
        if not math.isfinite(maxima[p].max()):
            continue
        whole, _ = fold_blocks(maxima[p], sums[p], temperature)
        logprobs[p] = whole.log_prob(targets[p])
        present = ids[p] >= 0
        first = order(logits[p, present], ids[p, present])[:k]
        top_ids[p, : len(first)] = ids[p, present][first]
        top_logprobs[p, : len(first)] = [whole.log_prob(logit) for logit in logits[p, present][first]]
    return logprobs, top_ids, top_logprobs


def shard_largest(logits_PL: Logits, first_id: int) -> tuple[Int32s, Floats]:
    """(ids, logits) of the shard's largest logit of each row, ties to the lowest id; a NaN counts as the largest.

    A shard without columns says -1 and -inf.
    """
    table = host_table(logits_PL)
    rows, columns = table.shape
    if not columns:
        return np.full(rows, -1, np.int32), np.full(rows, -np.inf, table.dtype)
    places = table.argmax(1)
    return (places + first_id).astype(np.int32), table[np.arange(rows), places]


def fold_largest(ids_SP: Int32s, logits_SP: Floats) -> Int32s:
    """[P] ids of the largest logits over all shards in rank order, ties to the lowest id.

    -1 for a row that held a NaN or +inf, or only -inf: what fails a row in `sample`.
    """
    largest_P = logits_SP.max(axis=0)  # NaN where any shard has one
    first = logits_SP.argmax(axis=0)  # of shards with equal logits the first, whose ids are lower
    chosen = ids_SP[first, np.arange(ids_SP.shape[1])]
    return np.where(np.isfinite(largest_P), chosen, np.int32(-1)).astype(np.int32)


def score(logits_PV: Logits, target_ids: Int32s, k: int) -> tuple[Float32s, Int32s, Float32s]:
    """Raw log probabilities of `target_ids` [P], and the first k alternatives [P * k] flat, as StepResult has them.

    NaN where the row held a NaN: the caller fails the request.
    """
    logprobs, ids, values = fold_scores([shard_scores(logits_PV, 0, target_ids, k)])
    return logprobs.astype(np.float32), ids.ravel(), values.astype(np.float32).ravel()
