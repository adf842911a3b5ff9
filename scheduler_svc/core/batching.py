"""From decisions to columns: the batch that is sent, and what the core keeps to read the result with.

Knows the columns of protos/step.py; chooses nothing but how a token budget is cut.
"""

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from protos.step import NO_INTS, Int32s
from scheduler_svc.core.rows import Bools, Int64s, Rows
from scheduler_svc.core.sequence import Sequence

# Rows that find a long prompt in the cache cost hardly any of the token budget, and each brings all its tokens along.
# So this bounds what one step introduces, one row at least; no message then comes near codec.MAX_MESSAGE_BYTES.
MAX_INTRODUCED_BYTES = 16 << 20

Kind = TypeVar("Kind", bound=np.generic)


@dataclass(eq=False, slots=True)
class Chunk:
    """Part of a sequence's known tokens, computed in one step: positions start .. start + count - 1."""

    sequence: Sequence
    slot: int
    serial: int
    start: int
    count: int
    samples: bool
    scores: int  # prompt scores that the step answers for it
    score_width: int  # alternatives of each


@dataclass(eq=False, slots=True)
class Step:
    """A step in flight: which rows it computes, R in slot order, as they were when it was sent.

    A row's result counts only while the slot still has the serial that it had then.
    """

    seq: int
    slots: Int64s
    serials: Int64s
    num_new: Int64s | None  # None: one each
    samples: Bools | None  # None: all
    chunks: list[Chunk]
    alternatives: Int64s | None  # [S] of sampling rows; None: no row asks
    logits: Bools | None  # [S] sampling rows that ask for logits; None: no row asks

    def sampling(self, column: NDArray[Kind]) -> NDArray[Kind]:
        """A column of rows cut down to the sampling ones."""
        return column if self.samples is None else column[self.samples]


@dataclass(eq=False, slots=True)
class Draft:
    """Decisions of one plan, before they are columns."""

    introduced: list[tuple[Sequence, int, int]] = field(default_factory=list)  # with num_computed, num_cached
    counts: dict[Sequence, int] = field(default_factory=dict)  # new tokens of PREFILL rows


def introduction_bytes(sequence: Sequence, block_size: int) -> int:
    """What introducing a waiting sequence adds to a message: its tokens, its table and its lists of token ids."""
    sampling, num_tokens = sequence.request.sampling, len(sequence.tokens)
    lists = 2 * len(sampling.bias_ids) + len(sampling.allowed_ids) + len(sampling.bad_ids) + len(sampling.stop_ids)
    return 4 * (num_tokens + num_tokens // block_size + lists)


def first_share(budget: int, contended: bool) -> int:
    """Tokens that the oldest prefill may take at once: when others want some too, half is kept for them."""
    return max(1, budget - budget // 2) if contended else budget


def extension(rows: Rows) -> tuple[Int32s, Int32s, Int32s]:
    """Slots, counts and ids of blocks that the workers do not know yet; they are told with this."""
    grown = np.flatnonzero(rows.introduced & (rows.num_blocks > rows.sent_blocks))
    if not len(grown):
        return NO_INTS, NO_INTS, NO_INTS
    had, has = rows.sent_blocks[grown], rows.num_blocks[grown]
    counts = has - had
    if (counts == 1).all():
        blocks = rows.table[grown, had]
    else:
        blocks = np.concatenate([rows.table[s, a:b] for s, a, b in zip(grown.tolist(), had.tolist(), has.tolist())])
    rows.sent_blocks[grown] = has
    return grown.astype(np.int32), counts.astype(np.int32), blocks


def step_columns(decoding: Int64s, serials: Int64s, chunks: list[Chunk]) -> tuple[Int64s, Int64s, Int64s, Bools]:
    """Slots, serials, num_new and samples of decoding rows and chunks together, by ascending slot."""
    few = np.array([(chunk.slot, chunk.serial, chunk.count, chunk.samples) for chunk in chunks], np.int64)
    slots = np.concatenate((decoding, few[:, 0]))
    order = np.argsort(slots, kind="stable")  # two ascending runs: merged, not sorted
    num_new = np.ones(len(slots), np.int64)
    num_new[len(decoding) :] = few[:, 2]
    samples = np.ones(len(slots), bool)
    samples[len(decoding) :] = few[:, 3]
    return slots[order], np.concatenate((serials, few[:, 1]))[order], num_new[order], samples[order]
