"""Scores and greedy tokens from vocabulary shards: ranks exchange a few numbers a row instead of the row.

Knows how a shard's findings are packed for one all-gather. Does not know how they are found or folded: that is the
sampler's arithmetic, by whole 1024-id blocks, so the bits are those of the gathered row. Invariant: every rank gets the
same answer.

Legend: P rows, D hidden size, L columns of this rank, B blocks of 1024 ids on the widest shard, k alternatives.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protos.step import Floats, Int32s
from worker_svc.models.decoder import Decoder
from worker_svc.parallel.group import Group
from worker_svc.sampling import ShardScores, fold_largest, fold_scores, shard_largest, shard_scores


def score_tokens(
    model: Decoder, hidden_PD: Tensor, target_ids: Int32s, k: int, group: Group
) -> tuple[Floats, Int32s, Floats]:
    """(logprobs [P], first k ids [P, k], their logprobs [P, k]): raw, ties by id, NaN where the row had one."""
    return score_shards(model, model.local_logits(hidden_PD), target_ids, k, group)


def score_shards(
    model: Decoder, local_PL: Tensor, target_ids: Int32s, k: int, group: Group
) -> tuple[Floats, Int32s, Floats]:
    """The same of logits that are there: this rank's columns, as `model.local_logits` gives them."""
    found = shard_scores(local_PL, model.vocabulary.first_id, target_ids, k)
    return fold_scores(_exchange(found, model, group))


def greedy_tokens(model: Decoder, local_PL: Tensor, group: Group) -> Int32s:
    """[P] ids of the largest logits, the lowest of equal ones; -1 for a row that the sampler would fail.

    Ranks exchange two numbers a row.
    """
    ids, logits = shard_largest(local_PL, model.vocabulary.first_id)
    packed = torch.from_numpy(np.stack((ids, logits)).astype(np.float64))  # both are exact in fp64
    gathered = group.all_gather(packed.to(model.device)).cpu().numpy()
    return fold_largest(gathered[:, 0].astype(np.int32), gathered[:, 1])


def _exchange(found: ShardScores, model: Decoder, group: Group) -> list[ShardScores]:
    if group.tp == 1:
        return [found]
    blocks = [-(-len(part) // 1024) for part in model.vocabulary.parts]
    # Ids and fp32 values are exact in fp64, so one matrix holds them all.
    spare = max(blocks) - found.maxima_PB.shape[1]
    columns = (
        np.pad(found.maxima_PB, ((0, 0), (0, spare))),
        np.pad(found.sums_PB, ((0, 0), (0, spare))),
        found.targets_P[:, None],
        found.top_ids,
        found.top_logits,
    )
    packed = torch.from_numpy(np.concatenate(columns, axis=1, dtype=np.float64))
    gathered = group.all_gather(packed.to(model.device)).cpu().numpy()
    dtype = found.targets_P.dtype
    return [_unpack(matrix, count, max(blocks), dtype) for matrix, count in zip(gathered, blocks, strict=True)]


def _unpack(matrix: NDArray[np.float64], count: int, widest: int, dtype: np.dtype[np.floating]) -> ShardScores:
    k = (matrix.shape[1] - 2 * widest - 1) // 2
    values = matrix.astype(dtype)
    at = 2 * widest + 1
    return ShardScores(
        maxima_PB=values[:, :count],
        sums_PB=values[:, widest : widest + count],
        targets_P=values[:, at - 1],
        top_ids=matrix[:, at : at + k].astype(np.int32),
        top_logits=values[:, at + k :],
    )
