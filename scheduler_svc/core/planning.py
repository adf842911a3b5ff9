"""What the next step computes: decodes first, then prompts under way, then new ones, in one ragged batch.

Decides who grows, who is preempted and who is admitted; residency.py carries it out. Every choice follows seniority
(priority, then age): a row takes blocks from juniors only, so no two rows can evict each other, and the oldest one
always gets on.
"""

import numpy as np

from protos.step import NO_INTS, StepBatch
from scheduler_svc.core import batching
from scheduler_svc.core.admission import Admission
from scheduler_svc.core.batching import Chunk, Draft, Step, extension, first_share, step_columns
from scheduler_svc.core.residency import Residency
from scheduler_svc.core.rows import DECODE, Bools, Int64s
from scheduler_svc.core.sampling_state import introduce
from scheduler_svc.core.sequence import Phase, Sequence

ROWS_A_RETRY = 16


class Planner:
    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._config = residency.config
        self._admission = Admission(residency)
        self._declined = (-1, -1, -1)  # order of the head that did not fit, num_changes and step of then
        self.blocked = ""  # why the head of the queue waits

    def plan(self, epoch: int, now: float) -> StepBatch | None:
        """The next batch, or None when no row can compute anything."""
        draft = Draft()
        self._grow_decodes()
        budget = self._config.max_batch_tokens - len(self._residency.rows.decoding())
        prefilling = sorted(self._residency.rows.prefilling, key=_seniority)
        contended = len(prefilling) > 1 or self._residency.queue.head() is not None
        if prefilling:
            budget -= self._chunk(draft, prefilling[0], first_share(budget, contended))
            for sequence in sorted(prefilling[1:], key=self._num_left):
                budget -= self._chunk(draft, sequence, budget)
        budget = self._admit(draft, budget, now)
        if prefilling and contended and budget:
            self._chunk(draft, prefilling[0], budget)
        return self._compose(draft, epoch)

    # Growth

    def _grow_decodes(self) -> None:
        """A block for every decoding row that needs one, the oldest first when there are too few."""
        rows, pool, config = self._residency.rows, self._residency.pool, self._config
        slots = rows.decoding()
        full = slots[rows.scheduled[slots] >= rows.num_blocks[slots] * config.block_size]
        if pool.num_available < len(slots):
            self._make_room(full)
            full = full[rows.phase[full] == DECODE]
        if len(full) > pool.num_available:
            full = full[np.lexsort((rows.order[full], -rows.priority[full]))][: pool.num_available]
        if len(full):
            rows.table[full, rows.num_blocks[full]] = pool.allocate(len(full))
            rows.num_blocks[full] += 1

    def _make_room(self, full: Int64s) -> None:
        """Preempt until the blocks that decoding rows need by the next commit are there or on their way."""
        rows, pool = self._residency.rows, self._residency.pool
        ahead = self._config.pipeline_depth - 1
        coming = self._residency.num_held
        while True:
            slots = rows.decoding()
            capacity = rows.num_blocks[slots] * self._config.block_size
            needing = (rows.scheduled[slots] + ahead >= capacity) & (rows.told[slots] + ahead < rows.limit[slots])
            needing |= rows.scheduled[slots] >= capacity
            if needing.sum() <= pool.num_available + coming:
                return
            victims = rows.victims()
            if len(victims) < 2:
                return
            coming += self._preempt(int(victims[0]))

    def _preempt(self, slot: int) -> int:
        """Blocks that come free later; those that are free at once are in the pool."""
        sequence = self._residency.rows.sequences[slot]
        assert sequence is not None
        own = int((self._residency.pool.references[self._residency.rows.blocks(slot)] == 1).sum())
        self._residency.leave(sequence, preempted=True)
        return own if self._residency.in_flight else 0

    def _num_left(self, sequence: Sequence) -> int:
        target = sequence.num_prompt - 1 if sequence.scores_only else int(self._residency.rows.known[sequence.slot])
        return target - int(self._residency.rows.scheduled[sequence.slot])

    def _chunk(self, draft: Draft, sequence: Sequence, budget: int) -> int:
        """Add up to `budget` more tokens of a PREFILL row to the step; how many were added."""
        if sequence.phase is not Phase.PREFILL:
            return 0  # preempted for an older one
        drafted = draft.counts.get(sequence, 0)
        count = min(self._num_left(sequence) - drafted, budget)
        end = int(self._residency.rows.scheduled[sequence.slot]) + drafted + count
        if count <= 0 or not self._grow_prefill(draft, sequence, end):
            return 0
        draft.counts[sequence] = drafted + count
        return count

    def _grow_prefill(self, draft: Draft, sequence: Sequence, num_tokens: int) -> bool:
        coming = self._residency.num_held
        needed = -(-num_tokens // self._config.block_size) - int(self._residency.rows.num_blocks[sequence.slot])
        while needed > self._residency.pool.num_available + coming:
            victims = self._residency.rows.victims()
            victim = self._residency.rows.sequences[victims[0]]
            if victim is sequence or victim in draft.counts:
                return False
            coming += self._preempt(int(victims[0]))
        return self._residency.grow(sequence, num_tokens)

    # Admission

    def _admit(self, draft: Draft, budget: int, now: float) -> int:
        """Seat waiting sequences in their order until one does not fit; the budget that is left."""
        rows, num_bytes = self._residency.rows, 0
        self.blocked = ""
        self._admission.begin()
        while (sequence := self._next(budget)) is not None:
            if not rows.num_free:
                self.blocked = "slots"
            elif not budget or (num_bytes and num_bytes + self._num_bytes(sequence) > batching.MAX_INTRODUCED_BYTES):
                self.blocked = "budget"
            elif self._still_declined(sequence):
                self.blocked = "blocks"
            else:
                num_more = self._num_bytes(sequence)
                count = self._try(draft, sequence, budget, now)
                budget -= count
                num_bytes += num_more if count else 0
            if self.blocked:
                break
        return budget

    def _num_bytes(self, sequence: Sequence) -> int:
        return batching.introduction_bytes(sequence, self._config.block_size)

    def _next(self, budget: int) -> Sequence | None:
        """The head of the queue, or one that would outlast all others if it were not started now."""
        queue = self._residency.queue
        head = queue.head()
        if head is None or self._config.order != "makespan":
            return head
        longest = queue.longest_beside(head)
        return longest if longest is not None and self._admission.outlasts(longest, max(1, budget)) else head

    def _still_declined(self, sequence: Sequence) -> bool:
        """While nobody comes or goes the forecast hardly changes; with many rows it costs, and is asked less often."""
        order, num_changes, seq = self._declined
        if (order, num_changes) != (sequence.order, self._residency.num_changes):
            return False
        return self._residency.next_seq - seq < self._residency.rows.num_live // ROWS_A_RETRY

    def _try(self, draft: Draft, sequence: Sequence, budget: int, now: float) -> int:
        """Seat the sequence, or park it behind the row that computes its prefix, or say what it lacks."""
        residency, config = self._residency, self._config
        to_compute = sequence.to_compute
        found: list[int] = []
        if config.prefix_cache:
            usable = (sequence.next_score - 1 if sequence.wants_scores else to_compute) // config.block_size
            chain = residency.chain(sequence, sequence.tokens, to_compute // config.block_size)
            found = residency.index.match(chain, usable)
            if len(found) < usable and chain[len(found)] in residency.index.pending:
                residency.queue.park(sequence, self._last_pending(chain[len(found) : usable]))
                return 0
        num_cached = len(found) * config.block_size
        num_computed = min(num_cached, to_compute - 1)
        count = min(to_compute - num_computed, budget)
        if not self._admission.fits(sequence, found, num_computed, count, budget):
            self.blocked = "blocks"
            self._declined = sequence.order, self._residency.num_changes, self._residency.next_seq
            return 0
        first = sequence.admitted_at is None
        residency.seat(sequence, found, num_computed, count)
        if first:
            self._count_first(sequence, num_computed, now)
        draft.introduced.append((sequence, num_computed, num_cached))
        draft.counts[sequence] = count
        return count

    def _count_first(self, sequence: Sequence, num_computed: int, now: float) -> None:
        sequence.admitted_at = now
        sequence.cached_tokens = min(num_computed, sequence.num_prompt)
        self._residency.counters.prefix_queries += sequence.num_prompt
        self._residency.counters.prefix_hits += sequence.cached_tokens
        sequence.reserved = sequence.limit - sequence.cached_tokens
        self._residency.queue.charge(sequence.request.tenant, sequence.reserved)

    def _last_pending(self, chain: list[bytes]) -> bytes:
        """The last block of the run that is being computed: the others are there when it is."""
        last = chain[0]
        for digest in chain[1:]:
            if digest not in self._residency.index.pending:
                break
            last = digest
        return last

    # Columns

    def _compose(self, draft: Draft, epoch: int) -> StepBatch | None:
        rows, residency = self._residency.rows, self._residency
        decoding = rows.decoding()
        serials = rows.decoding_serials()
        ready = rows.scheduled[decoding] < rows.num_blocks[decoding] * self._config.block_size
        held = NO_INTS
        if not ready.all():
            stuck = decoding[~ready]
            held = stuck[rows.told[stuck] - rows.scheduled[stuck] == 1].astype(np.int32)
            decoding, serials = decoding[ready], serials[ready]
        if not len(decoding) and not draft.counts:
            return None
        for sequence, _computed, _cached in draft.introduced:
            sequence.asked_scores = sequence.wants_scores
        introduced = tuple(
            introduce(s, rows.known_tokens(s.slot), rows.blocks(s.slot).copy(), computed, cached)
            for s, computed, cached in draft.introduced
        )
        extended = extension(rows)
        fed = self._feed(decoding)
        chunks = [self._to_chunk(sequence, count) for sequence, count in draft.counts.items()]
        chunks.sort(key=lambda chunk: chunk.slot)
        idle = [s.slot for s in rows.prefilling if s not in draft.counts]
        if idle:
            alone = [slot for slot in idle if rows.told[slot] - rows.scheduled[slot] == 1 and rows.introduced[slot]]
            held = np.sort(np.concatenate((held, alone))).astype(np.int32)
        batch = StepBatch(
            epoch,
            residency.next_seq,
            np.array(sorted(residency.to_retire), np.int32),
            introduced,
            *extended,
            decoding[fed].astype(np.int32) if fed is not None else NO_INTS,
            rows.tokens[decoding[fed], rows.known[decoding[fed]] - 1] if fed is not None else NO_INTS,
            np.array([chunk.slot for chunk in chunks], np.int32),
            np.array([chunk.count for chunk in chunks], np.int32),
            held,
        )
        residency.to_retire.clear()
        for sequence, _computed, _cached in draft.introduced:
            rows.introduced[sequence.slot] = True
            rows.sent_blocks[sequence.slot] = rows.num_blocks[sequence.slot]
        residency.in_flight.append(self._step(decoding, serials, chunks))
        residency.next_seq += 1
        self._advance(decoding, chunks)
        return batch

    def _feed(self, decoding: Int64s) -> Bools | None:
        """Which rows are told the token that was drawn at the scheduler; their `told` catches up."""
        if not self._config.sample_at_scheduler:
            return None
        rows = self._residency.rows
        fed: Bools = rows.known[decoding] > rows.told[decoding]
        rows.told[decoding] = rows.known[decoding]
        return fed

    def _to_chunk(self, sequence: Sequence, count: int) -> Chunk:
        slot, request = sequence.slot, sequence.request
        start = int(self._residency.rows.scheduled[slot])
        samples = not sequence.scores_only and start + count == self._residency.rows.known[slot]
        scores = max(0, min(start + count, sequence.num_prompt - 1) - start) if sequence.asked_scores else 0
        return Chunk(sequence, slot, sequence.serial, start, count, samples, scores, request.prompt_logprobs or 0)

    def _step(self, decoding: Int64s, serials: Int64s, chunks: list[Chunk]) -> Step:
        rows = self._residency.rows
        slots, num_new, samples = decoding, None, None
        if chunks:
            slots, serials, num_new, samples = step_columns(decoding, serials, chunks)
        step = Step(self._residency.next_seq, slots, serials, num_new, samples, chunks, None, None)
        if rows.num_alternatives.any():
            step.alternatives = rows.num_alternatives[step.sampling(slots)]
        if rows.wants_logits.any():
            step.logits = rows.wants_logits[step.sampling(slots)]
        return step

    def _advance(self, decoding: Int64s, chunks: list[Chunk]) -> None:
        """What was sent is scheduled; rows whose last token is on its way leave."""
        rows, counters = self._residency.rows, self._residency.counters
        rows.scheduled[decoding] += 1
        done: list[Sequence] = []
        if not self._config.sample_at_scheduler:
            told = rows.told[decoding] + 1
            rows.told[decoding] = told
            for slot in decoding[told >= rows.limit[decoding]].tolist():
                sequence = rows.sequences[slot]
                assert sequence is not None
                done.append(sequence)
        for chunk in chunks:
            slot, end = chunk.slot, chunk.start + chunk.count
            num_prompt = chunk.sequence.num_prompt
            rows.scheduled[slot] = end
            counters.scheduled_prompt_tokens += min(end, num_prompt) - min(chunk.start, num_prompt)
            if chunk.samples:
                self._residency.rows.set_phase(chunk.sequence, Phase.DECODE)
                if not self._config.sample_at_scheduler:
                    rows.told[slot] += 1
                    if rows.told[slot] >= rows.limit[slot]:
                        done.append(chunk.sequence)
            elif chunk.sequence.scores_only and end == num_prompt - 1:
                done.append(chunk.sequence)
        for sequence in done:
            self._residency.leave(sequence, preempted=False)
        num_tokens = len(decoding) + sum(chunk.count for chunk in chunks)
        counters.steps += 1
        counters.scheduled_tokens += num_tokens
        self._residency.ledger.add_work(num_tokens)


def _seniority(sequence: Sequence) -> tuple[int, int]:
    return -sequence.request.priority, sequence.order
