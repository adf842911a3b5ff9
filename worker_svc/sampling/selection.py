"""Which ids may be drawn: top-k, then top-p within the top-k set, then min-p. Ties go to the lower id; one id always
stays.

Sets are ordered by (logit descending, id ascending). The nucleus is decided on probability mass rounded to whole units
of 2^-40, held in doubles: sums below 2^53 are exact in any order, so a sort, a threshold search and another machine's
reduction agree. "Renormalised" is meant literally: the target is a share of the units there are, so it is reached.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protos.step import Floats, Int32s
from worker_svc.sampling.plain import BLOCK

UNITS = 2.0**40
BUCKETS = 1024
BUCKETS_PER_NAT = 24  # 42 nats: an id below has no mass in units of 2^-40, whatever the vocabulary
Float64s = NDArray[np.float64]


@dataclass(frozen=True, eq=False, slots=True)
class Kept:
    """ids [N] that may be drawn, ascending, and their (logit - row maximum) / temperature [N] in double precision."""

    ids: Int32s
    scores: Float64s


def order(z_N: Floats, ids_N: Int32s) -> NDArray[np.intp]:
    """Places sorted by (z descending, id ascending)."""
    places: NDArray[np.intp] = np.lexsort((ids_N, -z_N))
    return places


def top(z_V: Floats, k: int) -> Int32s:
    """The first k ids of the order. No NaN; -inf sorts last like any other value."""
    k = min(k, len(z_V))
    if k == 1:
        return np.array([z_V.argmax()], np.int32)
    ids = candidates(z_V, k)
    return ids[order(z_V[ids], ids)[:k]]


def candidates(z_V: Floats, k: int) -> Int32s:
    """At least the first k ids of the order, ascending; few more as a rule."""
    whole = len(z_V) // BLOCK * BLOCK
    if whole >= 2 * BLOCK and k <= BLOCK // 2:
        # k columns have a maximum of at least the k-th largest one, so at least k ids reach it.
        bound = np.partition(z_V[:whole].reshape(-1, BLOCK).max(axis=0), BLOCK - k)[BLOCK - k]
    elif k < len(z_V):
        bound = np.partition(z_V, len(z_V) - k)[len(z_V) - k]
    else:
        return np.arange(len(z_V), dtype=np.int32)
    return where(z_V >= bound)


def where(mask_V: NDArray[np.bool_]) -> Int32s:
    """Ids of the true entries, ascending; eight at a time, for they are few."""
    whole = len(mask_V) // 8 * 8
    octets = np.flatnonzero(mask_V[:whole].view(np.uint64))
    hits = octets if len(octets) * 8 > len(mask_V) else (octets[:, None] * 8 + np.arange(8)).ravel()
    if hits is octets:
        return np.flatnonzero(mask_V).astype(np.int32)
    hits = np.concatenate([hits[mask_V[hits]], whole + np.flatnonzero(mask_V[whole:])])
    return hits.astype(np.int32)


def select(z_V: Floats, maximum: float, temperature: float, top_k: int, top_p: float, min_p: float) -> Kept | None:
    """The ids that may be drawn; None when that is every id above -inf.

    Args:
        z_V: processed logits; `maximum` is theirs, finite.
    """
    whole = not 0 < top_k < len(z_V)
    if whole and top_p >= 1 and min_p <= 0:
        return None
    ids = top(z_V, top_k) if not whole else None
    if ids is None and top_p >= 1:
        # Only min-p: the slack is cut off exactly below.
        ids = where(z_V >= z_V.dtype.type(maximum + temperature * (np.log(min_p) - 1e-3) - abs(maximum) * 1e-6))
    scores = ((z_V if ids is None else z_V[ids]).astype(np.float64) - maximum) / temperature
    if top_p < 1:
        inside = _nucleus(scores, z_V if ids is None else z_V[ids], top_p)
        ids, scores = inside if ids is None else ids[inside], scores[inside]
    assert ids is not None
    stay = (scores > -np.inf) & (np.exp(scores) >= min_p)
    ids, scores = ids[stay], scores[stay]
    if not whole:  # top-k left them in order of logits
        ascending = np.argsort(ids)
        ids, scores = ids[ascending], scores[ascending]
    return Kept(ids, scores)


def _nucleus(scores_N: Float64s, z_N: Floats, top_p: float) -> Int32s:
    """Places, ascending, of the shortest beginning of the order whose mass reaches its share of the whole.

    Args:
        scores_N: logits over temperature less their maximum. Equal logits stand in id order.
    """
    mass = np.exp(scores_N)
    mass = np.floor(mass * (UNITS / mass.sum()) + 0.5)
    target = top_p * mass.sum()
    buckets = np.minimum(scores_N * -BUCKETS_PER_NAT, BUCKETS - 1).astype(np.int32)
    reached = np.cumsum(np.bincount(buckets, mass, BUCKETS))
    last = int(np.searchsorted(reached, target))  # the bucket in which the target is reached
    edge = np.flatnonzero(buckets == last)
    edge = edge[order(z_N[edge], edge.astype(np.int32))]
    before = reached[last - 1] if last else 0.0
    count = 1 + int(np.searchsorted(before + np.cumsum(mass[edge]), target))
    inside = buckets < last
    inside[edge[:count]] = True
    return where(inside)
