"""One step of the engine as values: what the scheduler sends and what a rank answers.

This file knows the meaning of every column; `codec.py` knows how they travel. Nothing here computes.

A worker keeps, for each live slot, its tokens, its block table and two counts: *known* tokens and *computed* tokens
(whose keys and values are in the cache). A batch is applied in this order:

    retired      the slots are forgotten
    rows         introduced: known = len(token_ids), computed = num_computed
    extended     block ids are appended to block tables
    fed          known += 1: the token was drawn elsewhere (sampling at the scheduler)
    forward      slots listed in `slots` compute their next `num_new` known tokens; a slot that is not listed computes
                 one token if exactly one of its known tokens is not computed (a steady decode row), unless `held`.

Rows of a step are ordered by ascending slot. A row *samples* when its computed tokens reach its known tokens; with
sampling at the worker the drawn token becomes known at once (known += 1), so that the next step may be sent before
this one's result is seen. Columns of a result follow the sampling rows in that order.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
Floats = NDArray[np.floating]


def int32s(*values: int) -> Int32s:
    """The values as an int32 column."""
    return np.array(values, np.int32)


NO_INTS: Int32s = int32s()
NO_FLOATS: Float32s = np.array([], np.float32)
for _empty in (NO_INTS, NO_FLOATS):
    _empty.flags.writeable = False


@dataclass(frozen=True, eq=False, slots=True)
class RowSampling:
    """How one row is sampled; everything that the sampler must know besides seed, position and history.

    Values are normalised: temperature 0 is greedy, top_k 0 is off, an empty `allowed_ids` allows all.
    `logprobs` is the number of alternatives beside the sampled token's own value; None computes neither.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias_ids: Int32s = field(default_factory=lambda: NO_INTS)
    bias_values: Float32s = field(default_factory=lambda: NO_FLOATS)
    allowed_ids: Int32s = field(default_factory=lambda: NO_INTS)
    bad_ids: Int32s = field(default_factory=lambda: NO_INTS)
    min_tokens: int = 0
    stop_ids: Int32s = field(default_factory=lambda: NO_INTS)  # masked until min_tokens are out
    logprobs: int | None = None
    raw_logprobs: bool = False
    return_logits: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Row:
    """Introduction of a row: self-contained, so that a worker that has just started needs nothing else.

    `token_ids` are all known tokens, prompt first; the output index of the next token is len(token_ids) - num_prompt.
    `prompt_logprobs` asks for the scores of prompt tokens computed in this introduction, with that many alternatives.
    `num_cached`: keys and values of positions below it are in the row's blocks already. Above num_computed only when
    every known token was found in shared blocks: the last one is computed again for its logits, and not written.
    """

    slot: int
    name: str  # request id and choice, for logs and recordings
    token_ids: Int32s
    num_prompt: int
    num_computed: int
    block_ids: Int32s
    seed: int
    choice: int = 0
    sampling: RowSampling = field(default_factory=RowSampling)
    prompt_logprobs: int | None = None
    num_cached: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class StepBatch:
    """One step for every rank. `extended_counts[i]` of `extended_blocks` belong to `extended_slots[i]`."""

    epoch: int
    seq: int
    retired: Int32s = field(default_factory=lambda: NO_INTS)
    rows: tuple[Row, ...] = ()
    extended_slots: Int32s = field(default_factory=lambda: NO_INTS)
    extended_counts: Int32s = field(default_factory=lambda: NO_INTS)
    extended_blocks: Int32s = field(default_factory=lambda: NO_INTS)
    fed_slots: Int32s = field(default_factory=lambda: NO_INTS)
    fed_token_ids: Int32s = field(default_factory=lambda: NO_INTS)
    slots: Int32s = field(default_factory=lambda: NO_INTS)
    num_new: Int32s = field(default_factory=lambda: NO_INTS)
    held: Int32s = field(default_factory=lambda: NO_INTS)


@dataclass(frozen=True, eq=False, slots=True)
class StepResult:
    """What a step drew, S sampling rows in slot order.

    token_ids [S] (-1 where the row failed) and logprobs [S] (0 where not asked for) are empty with sampling at the
    scheduler. Alternatives are flat: RowSampling.logprobs entries for each sampling row that asks, in row order.
    Prompt scores are flat over the computed positions p of rows that ask, in slot order then position order, one for
    each p with p + 1 < num_prompt: the raw logprob of prompt token p + 1; their alternatives likewise.
    failed_slots: rows whose logits held a NaN. logits [Q, V]: sampling rows that ask for logits (every sampling row
    with sampling at the scheduler), in row order, in the model's float32 or float64.
    """

    epoch: int
    seq: int
    digest: int
    token_ids: Int32s = field(default_factory=lambda: NO_INTS)
    logprobs: Float32s = field(default_factory=lambda: NO_FLOATS)
    alternative_ids: Int32s = field(default_factory=lambda: NO_INTS)
    alternative_logprobs: Float32s = field(default_factory=lambda: NO_FLOATS)
    prompt_logprobs: Float32s = field(default_factory=lambda: NO_FLOATS)
    prompt_alternative_ids: Int32s = field(default_factory=lambda: NO_INTS)
    prompt_alternative_logprobs: Float32s = field(default_factory=lambda: NO_FLOATS)
    failed_slots: Int32s = field(default_factory=lambda: NO_INTS)
    logits: Floats | None = None
    run_ms: float = 0.0
    wait_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Description:
    """A rank's facts, as it states them; the scheduler copies none of them into configuration."""

    rank: int
    tp: int
    model: str
    model_path: str
    vocab_size: int
    max_position_embeddings: int
    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    kv_dtype: str
    device: str
    memory_bytes: int
    kv_bytes_per_token: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    fingerprint: Mapping[str, str]
    ready: bool = True  # False while weights load
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """What a group of ranks is formed with. num_blocks 0: as many as fit on the smallest rank."""

    epoch: int
    block_size: int = 16
    num_blocks: int = 0
    max_num_seqs: int = 64
    max_batch_tokens: int = 512
    max_seq_len: int = 2048
    sample_at_scheduler: bool = False
    pipeline_depth: int = 1
    step_timeout_s: float = 30.0


class EpochLost(Exception):
    """The group can run no further step: a rank died, hung, disagreed or refused. Join a new epoch, introduce again."""


class CannotForm(EpochLost):
    """The ranks are there and cannot stand as a group of these sizes (memory, shapes): joining again ends the same way.

    Unless something outside changes, such as memory that a process on its way out still holds.
    """


def step_digest(epoch: int, seq: int, token_ids: Int32s, logprobs: Float32s, failed_slots: Int32s) -> int:
    """64 bits of what a rank drew in a step; equal on every rank or the epoch ends."""
    state = hashlib.blake2b(np.array([epoch, seq], "<u8").tobytes(), digest_size=8)
    for column, kind in ((token_ids, "<i4"), (logprobs, "<f4"), (failed_slots, "<i4")):
        state.update(np.ascontiguousarray(column, kind).tobytes())
    return int.from_bytes(state.digest(), "little")
