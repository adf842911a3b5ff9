"""`sample`: one token for each row, a pure function of the row's logits, parameters, seed and history.

Order of processing: logit bias, penalties, masks (allowed, bad, stop ids until min_tokens), / T, top-k, top-p within
the top-k set, min-p, the draw. Logprobs come from the model's logits, before all of it.

The draw is Gumbel-max: of the ids that may be drawn, the one of the largest

    (z - maximum) / T + g,    g = -log(-log(u))

in double precision, ties to the lower id; u is the counter's 32-bit word (`philox.py`), exact in double precision,
where log(u) loses nothing near 1. (A device that draws in single precision takes log1p(-(1 - u)) there.) z and the
maximum are in the logits' own dtype, parameters are single-precision numbers, and log is the C library's. Which ids are
looked at is decided by bounds that cannot exclude the winner, so it does not matter how loose they are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protos.step import Float32s, Floats, Int32s
from worker_svc.sampling import kernels
from worker_svc.sampling.logsumexp import Blocks, Logits, LogSumExp, block_maxima, host_table
from worker_svc.sampling.row import SamplerRow
from worker_svc.sampling.selection import Kept, select, top

FAILED = -1


@dataclass(frozen=True, eq=False, slots=True)
class Drawn:
    """Columns for R rows as StepResult has them.

    token_ids is -1 where the row failed: its logits held a NaN or +inf, or nothing was left to draw from. logprobs is 0
    where not asked for or failed. Alternatives are flat, `sampling.logprobs` entries for each row that asks; a failed
    row's are -1 and 0.
    """

    token_ids: Int32s
    logprobs: Float32s
    alternative_ids: Int32s
    alternative_logprobs: Float32s
    failed_slots: Int32s


def sample(logits_RV: Logits, rows: Sequence[SamplerRow]) -> Drawn:
    """Draw one token a row. Neither argument is changed; the caller appends what was drawn.

    Args:
        logits_RV: float32 or float64, a tensor on any device or an array; -inf is legal.
    """
    table = host_table(logits_RV)
    assert table.shape[0] == len(rows) and table.dtype in (np.float32, np.float64), (table.shape, table.dtype)
    blocks = Blocks(table.shape[1], table.dtype)
    tokens = np.full(len(rows), FAILED, np.int32)
    logprobs = np.zeros(len(rows), np.float32)
    ids: list[Int32s] = []
    values: list[Float32s] = []
    for r, row in enumerate(rows):
        report: LogSumExp | None = None
        drawn = _sample_row(table[r], row, blocks)
        if drawn is not None:
            tokens[r], report = drawn
            if report is not None:
                logprobs[r] = report.log_prob(table[r, tokens[r]])
        if row.sampling.logprobs:
            chosen, value = _alternatives(table[r], row.sampling.logprobs, report)
            ids.append(chosen)
            values.append(value)
    failed = [row.slot for row, token in zip(rows, tokens) if token == FAILED]
    return Drawn(
        tokens,
        logprobs,
        np.concatenate(ids) if ids else np.empty(0, np.int32),
        np.concatenate(values) if values else np.empty(0, np.float32),
        np.array(failed, np.int32),
    )


def _alternatives(logits_V: Floats, k: int, report: LogSumExp | None) -> tuple[Int32s, Float32s]:
    if report is None:
        return np.full(k, FAILED, np.int32), np.zeros(k, np.float32)
    assert k <= len(logits_V), "the front end refuses more alternatives than the vocabulary has"
    ids = top(logits_V, k)
    return ids, report.log_probs(logits_V[ids])


def _sample_row(logits_V: Floats, row: SamplerRow, blocks: Blocks) -> tuple[int, LogSumExp | None] | None:
    """The token, and the log-sum-exp of the report where one is asked for; None: the row failed."""
    asks = row.sampling.logprobs is not None
    if row.greedy and row.plain and not asks:
        token = int(logits_V.argmax())
        return (token, None) if math.isfinite(logits_V[token]) else None  # argmax finds a NaN first
    maxima_B = block_maxima(logits_V)
    if not math.isfinite(maxima_B.max()):
        return None
    report = blocks.fill(logits_V, maxima_B, row.report_temperature) if asks else None
    z_V = logits_V
    if not row.plain:
        z_V = row.process(logits_V)
        maxima_B = block_maxima(z_V)
        if not math.isfinite(maxima_B.max()):
            return None
    if row.greedy or row.top_k == 1:
        return int(z_V.argmax()), report
    # The report's exponentials serve the draw when they are of the same logits at the same temperature.
    ready = report is not None and z_V is logits_V and row.report_temperature == row.temperature
    return draw(z_V, maxima_B, row, blocks, ready), report


def draw(z_V: Floats, maxima_B: Floats, row: SamplerRow, blocks: Blocks, ready: bool = False) -> int:
    """The Gumbel-max over the ids that `select` keeps. ready: `blocks` hold z_V at the row's temperature."""
    maximum = float(maxima_B.max())
    kept = select(z_V, maximum, row.temperature, row.top_k, row.top_p, row.min_p)
    if kept is not None:
        return _draw_kept(kept, row, blocks)
    if not ready:
        blocks.fill(z_V, maxima_B, row.temperature)
    weights_BK = blocks.e_BK.astype(np.float32, copy=False)
    ids = kernels.race(row.keys, row.num_output, row.choice, weights_BK, blocks.factors_B, blocks.room)
    scores = (z_V[ids].astype(np.float64) - maximum) / row.temperature
    return _best(row, ids, scores)


def _draw_kept(kept: Kept, row: SamplerRow, blocks: Blocks) -> int:
    if len(kept.ids) == 1:
        return int(kept.ids[0])
    weights = np.exp(kept.scores).astype(np.float32)
    if len(kept.ids) * 4 > blocks.e_BK.size:  # a counter gives four ids, if one walks all of them
        weights_BK = np.zeros(blocks.e_BK.shape, np.float32)
        weights_BK.reshape(-1)[kept.ids] = weights
        blocks.factors_B.fill(1)
        ids = kernels.race(row.keys, row.num_output, row.choice, weights_BK, blocks.factors_B, blocks.room)
        return _best(row, ids, kept.scores[np.searchsorted(kept.ids, ids)])
    places = kernels.race_ids(row.keys, row.num_output, row.choice, kept.ids, weights, blocks.room)
    return _best(row, kept.ids[places], kept.scores[places])


def _best(row: SamplerRow, ids: Int32s, scores: NDArray[np.float64]) -> int:
    """The id of the largest score plus noise. One logarithm at a time: no vector width enters."""
    noise = kernels.complements(row.keys, row.num_output, row.choice, ids)
    best, winner = -math.inf, -1
    for token, score, v in zip(ids.tolist(), scores.tolist(), noise.tolist()):
        value = score - math.log(-math.log(1.0 - v))
        if value > best or (value == best and token < winner):
            best, winner = value, token
    return winner
