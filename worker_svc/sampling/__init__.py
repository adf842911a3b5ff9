"""The sampler: logits and rows in, tokens and logprobs out. A leaf: numpy, protos.step, and nothing else of ours.

    row.py         SamplerRow, one row's parameters and token history
    sampler.py     sample(logits_RV, rows) -> Drawn: the order of processing, and the draw
    scores.py      score(...): log probabilities of given tokens, whole or from vocabulary shards
    logsumexp.py   the one log-sum-exp, by 1024-id blocks and a fixed tree
    selection.py   top-k, top-p, min-p: which ids may be drawn
    philox.py      the counter-based noise, and its plain form in numpy
    kernels.py     the two loops over the vocabulary: compiled.py where numba is installed, else the twins in plain.py

The invariant: a row's result is a function of its own logits, parameters, seed and history. Rows are walked one by
one, and no expression here has seen two of them.
"""

from worker_svc.sampling.kernels import warm_up
from worker_svc.sampling.row import SamplerRow
from worker_svc.sampling.sampler import Drawn, sample
from worker_svc.sampling.scores import (
    ShardScores,
    fold_largest,
    fold_scores,
    score,
    shard_largest,
    shard_scores,
)

__all__ = [
    "Drawn",
    "SamplerRow",
    "ShardScores",
    "fold_largest",
    "fold_scores",
    "sample",
    "score",
    "shard_largest",
    "shard_scores",
    "warm_up",
]
