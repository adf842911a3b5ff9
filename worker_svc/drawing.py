"""Tokens of a step from vocabulary shards: who wants the largest logit exchanges a few numbers, others are gathered.

Knows which rows can do without their logits. Does not know how a token is drawn: that is the sampler's. Invariant: what
is drawn has the bits of the sampler over gathered rows, and every rank draws the same; which way a row goes follows
from the row alone.

Legend: S sampling rows, L columns of this rank, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from protos.step import NO_FLOATS, NO_INTS, Float32s
from worker_svc.models import Decoder
from worker_svc.parallel.group import Group
from worker_svc.sampling import Drawn, SamplerRow, sample
from worker_svc.vocabulary_scores import greedy_tokens, score_shards


def draw(model: Decoder, local_SL: Tensor, rows: Sequence[SamplerRow], group: Group) -> tuple[Drawn, Float32s | None]:
    """(what is drawn, logits [rows that return them, V] in row order or None).

    Args:
        local_SL: this rank's columns, as `model.local_logits` gives them.
    """
    apart = np.array([group.tp > 1 and needs_no_row(row) for row in rows])
    if apart.all():
        return _greedy(model, local_SL, rows, group), None
    if not apart.any():
        return _gathered(model, local_SL, rows, group)
    here, there = np.flatnonzero(apart), np.flatnonzero(~apart)
    greedy = _greedy(model, local_SL[here], [rows[i] for i in here], group)
    others, logits = _gathered(model, local_SL[there], [rows[i] for i in there], group)
    tokens, logprobs = np.empty(len(rows), np.int32), np.empty(len(rows), np.float32)
    for places, part in ((here, greedy), (there, others)):
        tokens[places], logprobs[places] = part.token_ids, part.logprobs
    failed = np.array([row.slot for row, token in zip(rows, tokens, strict=True) if token < 0], np.int32)
    return Drawn(tokens, logprobs, others.alternative_ids, others.alternative_logprobs, failed), logits


def needs_no_row(row: SamplerRow) -> bool:
    """Whether the row's token is the largest of the model's own logits and nothing else of them is asked for."""
    sampling = row.sampling
    return row.greedy and row.plain and not sampling.logprobs and not sampling.return_logits


def _gathered(
    model: Decoder, local_SL: Tensor, rows: Sequence[SamplerRow], group: Group
) -> tuple[Drawn, Float32s | None]:
    logits_SV = model.gather_logits(local_SL, group)
    wanted = np.array([row.sampling.return_logits for row in rows])
    return sample(logits_SV, rows), logits_SV.numpy()[wanted] if wanted.any() else None


def _greedy(model: Decoder, local_SL: Tensor, rows: Sequence[SamplerRow], group: Group) -> Drawn:
    """The largest logits of all ranks, and their log probabilities where a row asks."""
    asks = np.array([row.sampling.logprobs is not None for row in rows])
    if asks.any():
        scores, ids, values = score_shards(model, local_SL, np.zeros(len(rows), np.int32), 1, group)
        failed = np.isnan(scores)
        tokens = np.where(failed, np.int32(-1), ids[:, 0]).astype(np.int32)
        logprobs = np.where(asks & ~failed, values[:, 0], 0).astype(np.float32)
    else:
        tokens, logprobs = greedy_tokens(model, local_SL, group), np.zeros(len(rows), np.float32)
    slots = np.array([row.slot for row, token in zip(rows, tokens, strict=True) if token < 0], np.int32)
    return Drawn(tokens, logprobs, NO_INTS, NO_FLOATS, slots)
