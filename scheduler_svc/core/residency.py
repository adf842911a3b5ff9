"""Slots and blocks of running sequences: getting in, growing, being preempted, getting out.

Knows rows, blocks, the prefix index, the waiting queue and which steps are in flight; decides nothing. A block goes
back to the pool only when no step in flight uses it, and is found by content only when its step is acknowledged.
Invariant: every reference in the pool is a block of one row's table, or of an ended row that waits for its last step.
"""

from collections import deque

import numpy as np

from protos.step import Int32s
from scheduler_svc.core.batching import Step
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.ledger import Ledger
from scheduler_svc.core.lengths import LengthHistory
from scheduler_svc.core.prefix_cache import PrefixIndex, extend_chain, root_digest
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.sequence import Phase, Sequence
from scheduler_svc.core.stats import Counters
from scheduler_svc.core.stopping import StopTable


class Residency:
    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.rows = Rows(config.num_slots, config.max_blocks_per_row, config.max_seq_len)
        self.index = PrefixIndex(config.num_blocks)
        self.pool = self.index.pool
        self.queue = WaitingQueue(config.ageing_s, config.fair_tenants, by_length=config.order == "makespan")
        self.stops = StopTable()
        self.counters = Counters()
        self.ledger = Ledger(window=8 * config.num_blocks * config.block_size)
        self.lengths = LengthHistory()
        self.in_flight: deque[Step] = deque()
        self.next_seq = 0
        self.num_changes = 0  # of who runs
        self.leaving: list[Sequence] = []  # in order of leaves_after
        self.to_retire: list[int] = []
        self._held: deque[tuple[int, Int32s, int]] = deque()  # step to wait for, blocks of an ended row, its own
        self.num_held = 0  # blocks that come free when those steps are done
        self.end_blocks = 0  # that running rows would have, each with all its tokens and none shared

    # Getting in

    def blocks_at_end(self, sequence: Sequence) -> int:
        """Blocks of a choice that gets all its tokens; the last is never fed back."""
        return -(-max(sequence.limit - 1, sequence.num_prompt) // self.config.block_size)

    def chain(self, sequence: Sequence, tokens: Int32s, num_blocks: int) -> list[bytes]:
        """Digests of at least the first `num_blocks` full blocks of the sequence's tokens."""
        if len(sequence.chain) < num_blocks:
            root = root_digest(self.config.model_version, sequence.request.cache_salt)
            extend_chain(sequence.chain, root, tokens, self.config.block_size, num_blocks)
        return sequence.chain

    def seat(self, sequence: Sequence, found: list[int], num_computed: int, num_new: int) -> None:
        """Give a waiting sequence a slot, the blocks that were found for it and those of its first chunk."""
        needed = -(-(num_computed + num_new) // self.config.block_size) - len(found)
        blocks = np.array(found, np.int32)
        if found:
            self.pool.adopt(blocks)
        if needed > 0:
            allocated = self.pool.allocate(needed)
            blocks = np.concatenate((blocks, allocated)) if found else allocated
        self.queue.remove(sequence)
        self.num_changes += 1
        self.end_blocks += self.blocks_at_end(sequence)
        again = max(0, sequence.num_done - num_computed)
        self.counters.recomputed_tokens += again
        self.ledger.waste += again + sequence.expected_waste
        to_compute = sequence.to_compute
        self.rows.occupy(sequence, blocks, len(found), num_computed, len(found) * self.config.block_size)
        self.stops.add(sequence.stop_ids)
        if self.config.prefix_cache:
            for digest in sequence.chain[len(found) : to_compute // self.config.block_size]:
                if digest not in self.index.pending and digest not in self.index.blocks:
                    self.index.pending[digest] = sequence.serial
                    sequence.pending.append(digest)

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for `num_tokens` in all, every one of them or none."""
        slot = sequence.slot
        needed = -(-num_tokens // self.config.block_size) - int(self.rows.num_blocks[slot])
        if needed > self.pool.num_available:
            return False
        if needed > 0:
            self.rows.extend(slot, self.pool.allocate(needed))
        return True

    # Acknowledged content

    def acknowledge(self, sequence: Sequence) -> None:
        """The full blocks of its computed known tokens are found by content from now on."""
        if not self.config.prefix_cache:
            return
        slot = sequence.slot
        full = int(self.rows.computed[slot]) // self.config.block_size
        table = self.rows.table[slot, :full].tolist()
        first = int(self.rows.acknowledged[slot])
        if full <= first:
            return
        chain = self.chain(sequence, self.rows.tokens[slot], full)
        for i in range(first, full):
            self.index.insert(chain[i], table[i])
        self.rows.acknowledged[slot] = full
        if sequence.pending:
            done = [digest for digest in sequence.pending if digest in self.index.blocks]
            self._give_up_lead(sequence, done)

    def _distrust(self, sequence: Sequence) -> None:
        """None of its blocks may be found by content any more."""
        for block in self.rows.blocks(sequence.slot).tolist():
            self.index.remove(block)

    def _give_up_lead(self, sequence: Sequence, digests: list[bytes]) -> None:
        """Whoever waits for these blocks looks again: they are there, or will not come from this sequence."""
        for digest in digests:
            del self.index.pending[digest]
        gone = set(digests)
        sequence.pending = [digest for digest in sequence.pending if digest not in gone]
        self.queue.wake(digests)

    # Getting out

    def leave(self, sequence: Sequence, *, preempted: bool) -> None:
        """The workers forget the slot with the next batch; steps in flight are still to be told apart by it."""
        self.rows.set_phase(sequence, Phase.LEAVING)
        self._retire(sequence.slot)
        sequence.preempted = preempted
        sequence.leaves_after = self.next_seq - 1
        self._give_up_lead(sequence, sequence.pending)
        if preempted:
            self.counters.preemptions += 1
            sequence.preemptions += 1
            if not self.in_flight:
                self.requeue(sequence)
                return
        self.leaving.append(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Out of its slot with every token it has, to wait again. No step in flight holds it."""
        slot = sequence.slot
        self.acknowledge(sequence)
        tokens, blocks = self.rows.known_tokens(slot), self.rows.blocks(slot).copy()
        sequence.num_done = int(self.rows.computed[slot])
        self._vacate(sequence)
        self.pool.release(blocks)
        sequence.tokens, sequence.phase, sequence.preempted = tokens, Phase.WAITING, False
        self.queue.push(sequence)

    def end(self, sequence: Sequence, *, trusted: bool = True) -> None:
        """Out for good; its blocks stay held while a step in flight may write to them."""
        if sequence.phase is Phase.LEAVING:
            self.leaving.remove(sequence)
        else:
            self._retire(sequence.slot)
        self._give_up_lead(sequence, sequence.pending)
        if trusted:
            self.acknowledge(sequence)
        else:
            self._distrust(sequence)
        blocks = self.rows.blocks(sequence.slot).copy()
        self._vacate(sequence)
        if self.in_flight:
            alone = int((self.pool.references[blocks] == 1).sum())
            self._held.append((self.next_seq - 1, blocks, alone))
            self.num_held += alone
        else:
            self.pool.release(blocks)

    def settle(self, seq: int) -> None:
        """Every step up to `seq` is committed: what waited for that comes free."""
        while self._held and self._held[0][0] <= seq:
            self._free_oldest_held()
        while self.leaving and self.leaving[0].leaves_after <= seq:
            sequence = self.leaving.pop(0)
            assert sequence.preempted, f"{sequence.request.request_id} left and did not end"
            self.requeue(sequence)

    def forget_workers(self) -> None:
        """The workers hold nothing any more: every row waits again with the tokens that it has."""
        self.in_flight.clear()
        self.leaving.clear()
        self.next_seq = 0
        while self._held:
            self._free_oldest_held()
        self.index.clear()
        for slot in np.flatnonzero(self.rows.serial >= 0).tolist():
            sequence = self.rows.sequences[slot]
            assert sequence is not None
            self._give_up_lead(sequence, sequence.pending)
            self.rows.computed[slot] = 0
            self.requeue(sequence)
        self.to_retire.clear()
        self.queue.wake_all()

    def held_blocks(self) -> list[Int32s]:
        """Blocks of each ended row that waits for its last step."""
        return [blocks for _seq, blocks, _alone in self._held]

    def _free_oldest_held(self) -> None:
        _seq, blocks, alone = self._held.popleft()
        self.num_held -= alone
        self.pool.release(blocks)

    def _retire(self, slot: int) -> None:
        if self.rows.introduced[slot]:
            self.rows.introduced[slot] = False
            self.to_retire.append(slot)

    def _vacate(self, sequence: Sequence) -> None:
        self.num_changes += 1
        self.end_blocks -= self.blocks_at_end(sequence)
        self.stops.remove(sequence.stop_ids)
        self.ledger.waste -= sequence.expected_waste  # what it came to is counted when it starts again
        sequence.expected_waste = 0
        self.rows.vacate(sequence)
