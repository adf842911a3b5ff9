"""Attention over the paged cache in torch: the reference, in any float type.

Knows one pass of `work.py`. Bits of an output row depend on its query and its keys alone: each split is attended in
one product of fixed width, the queries padded to a height that the library treats alike, and splits are folded in order
with running maximum and sum. A split in which a query sees nothing changes nothing: exp(LOWEST - m) is zero.

Legend: W items, N tiles, Q queries a tile, K kv heads, G query heads a kv head, M = padded Q * G, S keys, E head size.
"""

import torch
from torch import Tensor

from worker_svc.attention.work import SPLIT, Pass
from worker_svc.kv_cache import LayerCache

LOWEST = -1e30  # below every score, and finite


def attend(
    q_THE: Tensor, cache: LayerCache, work: Pass, out_THE: Tensor, *, num_kv_heads: int, row_multiple: int
) -> None:
    """Attend the tokens of one pass. q is scaled already, in the accumulator's dtype."""
    height = work.tokens_NQ.shape[1]
    head_dim, groups = q_THE.shape[2], q_THE.shape[1] // num_kv_heads
    if work.in_order and height == 1:
        q = q_THE.view(-1, num_kv_heads, groups, head_dim)
    else:
        q = q_THE[work.tokens_NQ].view(-1, height, num_kv_heads, groups, head_dim).transpose(1, 2)
        q = q.reshape(-1, num_kv_heads, height * groups, head_dim)
    rows = height * groups
    padded = -(-rows // row_multiple) * row_multiple
    if padded != rows:
        q = torch.nn.functional.pad(q, (0, 0, 0, padded - rows))
    begin, end = work.bounds[0]
    total, best, weighted = _splits(q, cache, work, begin, end, groups)
    for (begin, end), tiles in zip(work.bounds[1:], work.folded, strict=True):
        part_total, part_best, part_weighted = _splits(q, cache, work, begin, end, groups)
        old_best, old_total, old_weighted = best[tiles], total[tiles], weighted[tiles]
        new_best = torch.maximum(old_best, part_best)
        old_scale, part_scale = (old_best - new_best).exp_(), (part_best - new_best).exp_()
        best[tiles] = new_best
        total[tiles] = old_total * old_scale + part_total * part_scale
        weighted[tiles] = old_weighted * old_scale + part_weighted * part_scale
    attended = (weighted / total)[:, :, :rows]
    if height == 1:
        attended = attended.reshape(-1, out_THE.shape[1], head_dim)
        if work.in_order:
            out_THE.copy_(attended)
        else:
            out_THE[work.tokens_NQ.view(-1)] = attended.to(out_THE.dtype)
        return
    attended = attended.view(-1, num_kv_heads, height, groups, head_dim).transpose(1, 2)
    attended = attended.reshape(-1, height, out_THE.shape[1], head_dim).to(out_THE.dtype)
    if work.valid_NQ is None:
        out_THE[work.tokens_NQ] = attended
    else:
        out_THE[work.tokens_NQ[work.valid_NQ]] = attended[work.valid_NQ]


def _splits(
    q_NKME: Tensor, cache: LayerCache, work: Pass, begin: int, end: int, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Items begin .. end - 1: sum of weights [W, K, M, 1], largest score, weighted values [W, K, M, E]."""
    _, heads, padded, head_dim = q_NKME.shape
    items = end - begin
    keys = work.keys_W[begin:end]
    q = q_NKME if items == len(q_NKME) else q_NKME[work.item_tiles_W[begin:end]]
    k = _gather(cache.keys, keys, head_dim, q.dtype).view(items * heads, SPLIT, head_dim)
    v = _gather(cache.values, keys, head_dim, q.dtype).view(items * heads, SPLIT, head_dim)
    scores = torch.bmm(q.reshape(items * heads, padded, head_dim), k.transpose(1, 2))
    hidden = work.hidden_WQS[begin:end]
    if hidden.shape[1] > 1:
        hidden = hidden.repeat_interleave(groups, dim=1)
        hidden = torch.nn.functional.pad(hidden, (0, 0, 0, padded - hidden.shape[1]), value=True)
    scores = scores.view(items, heads, padded, SPLIT)
    scores.masked_fill_(hidden.unsqueeze(1), float("-inf"))
    best = scores.amax(-1, keepdim=True).clamp_(min=LOWEST)
    weights = scores.sub_(best).exp_()
    total = weights.sum(-1, keepdim=True)
    weighted = torch.bmm(weights.view(items * heads, padded, SPLIT), v)
    return total, best, weighted.view(items, heads, padded, head_dim)


def _gather(cache: Tensor, indices: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    width = cache.shape[2] * head_dim if indices.shape[-1] * cache.shape[2] == SPLIT else head_dim
    return cache.view(-1, width).index_select(0, indices.reshape(-1)).to(dtype)
