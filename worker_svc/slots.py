"""The slot table of a rank: what a batch leaves unsaid, and nothing that a new introduction could not say again.

Knows each live slot's tokens, block table and two counts, *known* and *computed* (protos/step.py). Does not know the
model, the sampler or the device. Invariant: 0 <= computed <= known for every live slot, and every position below
computed lies in a block of the slot's table. A batch that contradicts the table raises Contradiction and is not
applied further; the epoch cannot go on after that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from protos.step import Int32s, Row, StepBatch


class Contradiction(ValueError):
    """The scheduler and this rank disagree about a slot."""


@dataclass(frozen=True, eq=False, slots=True)
class StepPlan:
    """One step in full: R rows by ascending slot, T tokens.

    Row r computes token_ids[query_starts[r] : query_starts[r + 1]] at positions first_position[r], .. ; a token id of
    -1 is one that only the device knows. Entries of block_tables[r] past the row's blocks are 0.
    """

    slots: Int32s  # [R]
    num_new: Int32s  # [R]
    first_position: Int32s  # [R] tokens computed before the step
    num_cached: Int32s  # [R] keys and values of positions below it are in shared blocks and are not written
    samples: NDArray[np.bool_]  # [R] the computed tokens reach the known ones
    token_ids: Int32s  # [T]
    block_tables: Int32s  # [R, B]
    query_starts: Int32s  # [R + 1]
    rows: tuple[Row, ...]  # [R] as introduced


class SlotTable:
    """Args:
    max_num_seqs: slots are 0 .. max_num_seqs - 1.
    max_blocks_per_row: the longest block table.
    block_size, num_blocks, vocab_size: when given, table lengths, block ids and token ids are checked against them.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks_per_row: int,
        *,
        block_size: int | None = None,
        num_blocks: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._live = np.zeros(max_num_seqs, bool)
        self._known = np.zeros(max_num_seqs, np.int32)
        self._computed = np.zeros(max_num_seqs, np.int32)
        self._cached = np.zeros(max_num_seqs, np.int32)
        self._tokens = np.zeros((max_num_seqs, 64), np.int32)  # [slot, position], wider as rows grow
        self._tables = np.zeros((max_num_seqs, max_blocks_per_row), np.int32)
        self._table_lengths = np.zeros(max_num_seqs, np.int32)
        self._rows: list[Row | None] = [None] * max_num_seqs
        self._seq: int | None = None

    @property
    def live(self) -> Int32s:
        """The live slots, ascending."""
        return np.flatnonzero(self._live).astype(np.int32)

    def tokens(self, slot: int) -> Int32s:
        """A copy of the slot's known tokens."""
        return self._tokens[slot, : self._known[slot]].copy()

    def introductions(self) -> tuple[Row, ...]:
        """The live rows as they stand now, each as an introduction of its own."""
        return tuple(
            replace(
                row,
                token_ids=self.tokens(slot),
                num_computed=int(self._computed[slot]),
                block_ids=self._tables[slot, : self._table_lengths[slot]].copy(),
            )
            for slot in self.live.tolist()
            if (row := self._rows[slot]) is not None
        )

    def apply(self, batch: StepBatch) -> StepPlan:
        """Apply a batch in the order of protos/step.py; the rows that run, their counts already advanced."""
        if self._seq is not None and batch.seq != self._seq + 1:
            raise Contradiction(f"step {batch.seq} after step {self._seq}")
        self._seq = batch.seq
        self._retire(batch.retired)
        for row in batch.rows:
            self._introduce(row)
        if len(batch.extended_slots):
            self._extend(batch.extended_slots, batch.extended_counts, batch.extended_blocks)
        if len(batch.fed_slots):
            self._feed(batch.fed_slots, batch.fed_token_ids)
        return self._advance(batch)

    def drawn(self, plan: StepPlan, token_ids: Int32s) -> None:
        """The tokens of the plan's sampling rows become known, before the next batch is applied.

        -1 is a token that the host does not know: it is on the device, or its row failed and runs on, to be thrown
        away, until it is retired.
        """
        slots = plan.slots[plan.samples]
        if len(slots) != len(token_ids):
            raise Contradiction(f"{len(token_ids)} tokens drawn for {len(slots)} sampling rows")
        self._append(slots, token_ids)

    def _retire(self, slots: Int32s) -> None:
        self._require_live("retired", slots)
        self._live[slots] = False
        for slot in slots.tolist():
            self._rows[slot] = None

    def _introduce(self, row: Row) -> None:
        slot, known, blocks = row.slot, len(row.token_ids), len(row.block_ids)
        if not 0 <= slot < self.max_num_seqs:
            raise Contradiction(f"slot {slot} of {self.max_num_seqs}")
        if self._live[slot]:
            raise Contradiction(f"slot {slot} is introduced while live")
        if not 0 <= row.num_computed < known or not row.num_cached <= known or not 1 <= row.num_prompt <= known:
            raise Contradiction(
                f"slot {slot}: {row.num_computed} computed, {row.num_cached} cached and {row.num_prompt} prompt tokens "
                f"of {known} known"
            )
        self._check_blocks(slot, 0, row.block_ids)
        self._check_tokens(row.token_ids)
        self._live[slot] = True
        self._rows[slot] = row
        self._known[slot], self._computed[slot], self._cached[slot] = known, row.num_computed, row.num_cached
        self._reserve(known)
        self._tokens[slot, :known] = row.token_ids
        self._tables[slot, :blocks] = row.block_ids
        self._tables[slot, blocks:] = 0
        self._table_lengths[slot] = blocks

    def _extend(self, slots: Int32s, counts: Int32s, blocks: Int32s) -> None:
        self._require_live("extended", slots)
        if len(slots) != len(counts) or int(counts.sum()) != len(blocks) or (counts < 0).any():
            raise Contradiction("extended counts do not add up to the blocks")
        starts = np.concatenate(([0], np.cumsum(counts)))
        for i, slot in enumerate(slots.tolist()):
            new = blocks[starts[i] : starts[i + 1]]
            old = int(self._table_lengths[slot])
            self._check_blocks(slot, old, new)
            self._tables[slot, old : old + len(new)] = new
            self._table_lengths[slot] = old + len(new)

    def _feed(self, slots: Int32s, token_ids: Int32s) -> None:
        self._require_live("fed", slots)
        if len(slots) != len(token_ids):
            raise Contradiction("fed columns differ in length")
        if (self._known[slots] != self._computed[slots]).any():
            raise Contradiction("a slot is fed before it has computed what it knows")
        self._check_tokens(token_ids)
        self._append(slots, token_ids)

    def _advance(self, batch: StepBatch) -> StepPlan:
        self._require_live("listed", batch.slots)
        self._require_live("held", batch.held)
        if len(batch.slots) != len(batch.num_new):
            raise Contradiction("slots and num_new differ in length")
        new = np.where(self._live & (self._known - self._computed == 1), np.int32(1), np.int32(0))
        new[batch.held] = 0
        if (new.size and np.isin(batch.slots, batch.held).any()) or (batch.num_new < 1).any():
            raise Contradiction("a listed slot is held or computes nothing")
        new[batch.slots] = batch.num_new
        slots = np.flatnonzero(new).astype(np.int32)
        num_new, first = new[slots], self._computed[slots]
        end = first + num_new
        known = self._known[slots]
        if (end > known).any():
            raise Contradiction(f"slots {slots[end > known].tolist()} compute past their known tokens")
        lengths = self._table_lengths[slots]
        if self._block_size is not None and (end > lengths * self._block_size).any():
            raise Contradiction(f"slots {slots[end > lengths * self._block_size].tolist()} write past their blocks")
        self._computed[slots] = end
        query_starts = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(num_new, out=query_starts[1:])
        token_rows = np.repeat(slots, num_new)
        positions = np.arange(query_starts[-1], dtype=np.int32) + np.repeat(first - query_starts[:-1], num_new)
        return StepPlan(
            slots=slots,
            num_new=num_new,
            first_position=first,
            num_cached=self._cached[slots],
            samples=end == known,
            token_ids=self._tokens[token_rows, positions],
            block_tables=self._tables[slots, : max(1, int(lengths.max(initial=0)))],
            query_starts=query_starts,
            rows=tuple(row for slot in slots.tolist() if (row := self._rows[slot]) is not None),
        )

    def _append(self, slots: Int32s, token_ids: Int32s) -> None:
        known = self._known[slots]
        self._reserve(int(known.max(initial=0)) + 1)
        self._tokens[slots, known] = token_ids
        self._known[slots] = known + 1

    def _reserve(self, width: int) -> None:
        have = self._tokens.shape[1]
        if width > have:
            wider = np.zeros((self.max_num_seqs, max(width, 2 * have)), np.int32)
            wider[:, :have] = self._tokens
            self._tokens = wider

    def _require_live(self, what: str, slots: Sequence[int] | Int32s) -> None:
        column = np.asarray(slots, np.int32)
        if not len(column):
            return
        if column.min() < 0 or column.max() >= self.max_num_seqs or not self._live[column].all():
            raise Contradiction(f"{what}: slots {column.tolist()} are not all live")
        if len(np.unique(column)) != len(column):
            raise Contradiction(f"{what}: a slot is listed twice in {column.tolist()}")

    def _check_tokens(self, token_ids: Int32s) -> None:
        if self._vocab_size is not None and (token_ids.min() < 0 or token_ids.max() >= self._vocab_size):
            raise Contradiction(
                f"token ids {token_ids.min()} .. {token_ids.max()} of a vocabulary of {self._vocab_size}"
            )

    def _check_blocks(self, slot: int, have: int, blocks: Int32s) -> None:
        if have + len(blocks) > self._tables.shape[1]:
            raise Contradiction(f"slot {slot}: {have + len(blocks)} blocks in a table of {self._tables.shape[1]}")
        if len(blocks) and (blocks.min() < 0 or (self._num_blocks is not None and blocks.max() >= self._num_blocks)):
            raise Contradiction(f"slot {slot}: block ids {blocks.tolist()} of a pool of {self._num_blocks}")
