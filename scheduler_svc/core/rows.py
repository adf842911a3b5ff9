"""State of running rows in numpy columns by slot, so that a step costs numpy calls and not a Python loop.

Counts of one row, in tokens, with steps in flight:

    computed <= scheduled <= told      known <= told (sampling at the workers)   told <= known (at the scheduler)

computed: keys and values acknowledged. scheduled: those of batches sent. known: tokens that the core has seen.
told: tokens that the workers know or will have drawn when they run the batches sent.
Knows no policy. Invariant: columns of a slot mean something only while its serial is not -1.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from protos.step import Int32s
from scheduler_svc.core.sequence import Phase, Sequence

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]
NO_SLOTS: Int64s = np.array([], np.int64)

FREE, PREFILL, DECODE, LEAVING = 0, 1, 2, 3
_CODES = {Phase.PREFILL: PREFILL, Phase.DECODE: DECODE, Phase.LEAVING: LEAVING}
_COLUMNS = (
    "key",
    "choice",
    "known",
    "told",
    "scheduled",
    "computed",
    "num_blocks",
    "sent_blocks",
    "acknowledged",
    "num_adopted",
    "num_cached",
    "limit",
    "num_prompt",
    "num_alternatives",
    "priority",
    "order",
)


class Rows:
    """Args: num_slots, max_blocks_per_row, max_seq_len: the bounds of the columns."""

    key: Int64s
    choice: Int64s
    known: Int64s
    told: Int64s
    scheduled: Int64s
    computed: Int64s
    num_blocks: Int64s
    sent_blocks: Int64s  # of them, those that the workers were told
    acknowledged: Int64s  # of them, those that are found by content
    num_adopted: Int64s  # leading blocks that it found and does not own alone
    num_cached: Int64s  # positions below it are never written by this row
    limit: Int64s
    num_prompt: Int64s
    num_alternatives: Int64s
    priority: Int64s
    order: Int64s

    def __init__(self, num_slots: int, max_blocks_per_row: int, max_seq_len: int) -> None:
        self.num_slots = num_slots
        self.serial = np.full(num_slots, -1, np.int64)
        self.phase = np.zeros(num_slots, np.int8)
        self.introduced = np.zeros(num_slots, bool)  # the workers hold the slot
        self.wants_logits = np.zeros(num_slots, bool)
        self.may_stop = np.zeros(num_slots, bool)  # some token ends it before its max_tokens
        for name in _COLUMNS:
            setattr(self, name, np.zeros(num_slots, np.int64))
        self.tokens = np.zeros((num_slots, min(64, max_seq_len)), np.int32)  # wider as rows grow
        self.table = np.zeros((num_slots, max_blocks_per_row), np.int32)
        self.sequences: list[Sequence | None] = [None] * num_slots
        self._max_seq_len = max_seq_len
        self._free = list(range(num_slots))
        self._next_serial = 0
        self._decoding: Int64s | None = NO_SLOTS
        self._decoding_serials: Int64s = NO_SLOTS
        self.prefilling: list[Sequence] = []  # few

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_live(self) -> int:
        return self.num_slots - len(self._free)

    def decoding(self) -> Int64s:
        """Slots of DECODE rows, ascending. The array is replaced, never changed, so steps in flight may keep it."""
        if self._decoding is None:
            self._decoding = np.flatnonzero(self.phase == DECODE)
            self._decoding_serials = self.serial[self._decoding]
        return self._decoding

    def decoding_serials(self) -> Int64s:
        self.decoding()
        return self._decoding_serials

    def occupy(self, sequence: Sequence, blocks: Int32s, num_adopted: int, num_computed: int, num_cached: int) -> int:
        """Give the sequence the lowest free slot; its tokens move to the columns."""
        slot = heapq.heappop(self._free)
        request, known = sequence.request, len(sequence.tokens)
        sequence.slot, sequence.serial = slot, self._next_serial
        self.serial[slot] = self._next_serial
        self._next_serial += 1
        self.key[slot], self.choice[slot] = request.key, sequence.choice
        self.known[slot] = self.told[slot] = known
        self.scheduled[slot] = self.computed[slot] = num_computed
        self.num_blocks[slot], self.sent_blocks[slot] = len(blocks), 0
        self.num_adopted[slot] = self.acknowledged[slot] = num_adopted
        self.num_cached[slot] = num_cached
        self.limit[slot], self.num_prompt[slot] = sequence.limit, sequence.num_prompt
        self.num_alternatives[slot] = request.sampling.logprobs or 0
        self.wants_logits[slot] = request.sampling.return_logits
        self.may_stop[slot] = bool(sequence.stop_set)
        self.priority[slot], self.order[slot] = request.priority, sequence.order
        self.reserve(known + 1)
        self.tokens[slot, :known] = sequence.tokens
        self.table[slot, : len(blocks)] = blocks
        self.sequences[slot] = sequence
        sequence.forget_tokens()
        self.set_phase(sequence, Phase.PREFILL)
        return slot

    def vacate(self, sequence: Sequence) -> None:
        slot = sequence.slot
        self.set_phase(sequence, Phase.ENDED)
        self.serial[slot] = -1
        self.introduced[slot] = self.wants_logits[slot] = False
        self.num_alternatives[slot] = 0
        self.sequences[slot] = None
        heapq.heappush(self._free, slot)
        sequence.slot = sequence.serial = -1

    def set_phase(self, sequence: Sequence, phase: Phase) -> None:
        if sequence.phase is Phase.PREFILL:
            self.prefilling.remove(sequence)
        if Phase.DECODE in (sequence.phase, phase):
            self._decoding = None
        sequence.phase = phase
        if phase is Phase.PREFILL:
            self.prefilling.append(sequence)
        self.phase[sequence.slot] = _CODES.get(phase, FREE)

    def blocks(self, slot: int) -> Int32s:
        return self.table[slot, : self.num_blocks[slot]]

    def extend(self, slot: int, blocks: Int32s) -> None:
        count = int(self.num_blocks[slot])
        self.table[slot, count : count + len(blocks)] = blocks
        self.num_blocks[slot] = count + len(blocks)

    def reserve(self, width: int) -> None:
        """Make room for `width` tokens in every row."""
        if width > self.tokens.shape[1]:
            wider = min(max(width, 2 * self.tokens.shape[1]), max(width, self._max_seq_len))
            grown = np.zeros((self.num_slots, wider), np.int32)
            grown[:, : self.tokens.shape[1]] = self.tokens
            self.tokens = grown

    def known_tokens(self, slot: int) -> Int32s:
        """A copy of the tokens that the core knows."""
        return self.tokens[slot, : self.known[slot]].copy()

    def victims(self) -> Int64s:
        """Slots of rows that may be preempted, the first to go first: lowest priority, then youngest."""
        slots: Int64s = np.flatnonzero((self.phase == PREFILL) | (self.phase == DECODE))
        ranked: Int64s = slots[np.lexsort((-self.order[slots], self.priority[slots]))]
        return ranked
