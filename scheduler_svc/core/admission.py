"""Whether a waiting sequence starts now.

It starts when its first chunk has blocks and the forecast sees room for all of it. It may also start in blocks that
others need only later, if what it gains is worth what it will have to compute again: it is then the first to be
preempted and keeps its tokens. The ledger bounds what is spent in this way.
"""

import numpy as np

from scheduler_svc.core.outlook import Outlook
from scheduler_svc.core.residency import Residency
from scheduler_svc.core.rows import DECODE, LEAVING, PREFILL
from scheduler_svc.core.sequence import Sequence

# 400 requests of mean length 97 that may all reach 2048, 64 slots: 0 recomputes 8 % and takes 1300 steps, 0.5 4 % and
# 1312, 1 1.5 % and 1331; admitting whatever fits now recomputes 17 % and takes 1293.
RESERVE = 0.5
MIN_IDLE = 0.05  # share of the pool that must lie idle before anything is started that will not fit to its end


class Admission:
    """The forecast of one plan; `begin` a new one for each."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._config = residency.config
        self._rows: Outlook | None = None  # running rows, once they are needed
        self._shared = 0  # blocks in use beside the rows' own

    def begin(self) -> None:
        self._rows = None

    def fits(self, sequence: Sequence, found: list[int], num_computed: int, count: int, budget: int) -> bool:
        """Whether the sequence starts, with the blocks that were found and `count` tokens in this step."""
        pool, config = self._residency.pool, self._config
        now = max(0, -(-(num_computed + count) // config.block_size) - len(found))
        revived = int((pool.references[found] == 0).sum()) if found else 0
        sequence.expected_waste = 0
        if now + revived > pool.num_available:
            return False
        if not self._residency.rows.num_live:
            return True
        if pool.num_available - now - revived < config.watermark * pool.num_blocks:
            return False
        if not config.forecast:
            return True
        if self._fits_at_worst(sequence):
            self._rows = None
            return True
        if self._rows is None:
            self._rows, self._shared = self._look_ahead(budget)
        shared = self._shared + revived
        with_it = self._with(self._rows, sequence, len(found), num_computed, budget)
        starts = self._fits_to_its_end(with_it, shared) or self._is_worth_it(
            with_it, shared, sequence, num_computed, budget
        )
        if starts:
            self._rows, self._shared = with_it, shared
        return starts

    def _with(self, rows: Outlook, sequence: Sequence, num_found: int, num_computed: int, budget: int) -> Outlook:
        target = sequence.to_compute
        steps = -(-(target - num_computed) // budget)
        generated = max(0, target - sequence.num_prompt)
        output = self._residency.lengths.expected_of_one(
            generated, sequence.request.max_tokens, bool(sequence.stop_set), sequence.order
        )
        end = max(target, sequence.num_prompt + output - 1)
        return rows.plus(target - steps, steps - 1 + end - target + self._config.pipeline_depth - 1, num_found)

    def _fits_at_worst(self, sequence: Sequence) -> bool:
        """Whether the pool holds everybody at full length at once: no forecast can say less, so none is made."""
        residency = self._residency
        reserve = self._reserve(residency.rows.num_live + 1)
        return residency.end_blocks + residency.blocks_at_end(sequence) + reserve <= self._config.num_blocks

    def _fits_to_its_end(self, with_it: Outlook, shared: int) -> bool:
        reserve = self._reserve(len(with_it.last))
        return with_it.fills_at(self._config.num_blocks - shared - reserve, self._config.block_size) is None

    def _reserve(self, num_rows: int) -> int:
        """Blocks for rows that get longer than expected: RESERVE standard deviations of their sum, at most a tenth."""
        spread = RESERVE * self._residency.lengths.spread() * num_rows**0.5
        return min(int(spread / self._config.block_size), self._config.num_blocks // 10)

    def _is_worth_it(self, with_it: Outlook, shared: int, sequence: Sequence, num_computed: int, budget: int) -> bool:
        """It will be preempted when the pool is full: it gains tokens until then, and keeps some blocks afterwards."""
        config, target = self._config, sequence.to_compute
        if self._residency.pool.num_available < MIN_IDLE * config.num_blocks or not self._would_go_first(sequence):
            return False
        spare = config.num_blocks - shared
        fills_at = with_it.fills_at(spare, config.block_size)
        if fills_at is None:
            return False
        gain = fills_at - -(-(target - num_computed) // budget) + 1
        kept = 0
        if config.prefix_cache and self._rows is not None:
            times, usage = self._rows.usage_at_endings(config.block_size)
            kept = max(0, spare - int(usage[times >= fills_at].max(initial=0)))
        waste = max(0, target + gain - kept * config.block_size)
        if gain <= 0 or not self._residency.ledger.allows(gain, waste, self._work_ahead()):
            return False
        sequence.expected_waste = waste
        return True

    def _would_go_first(self, sequence: Sequence) -> bool:
        """A full pool takes it or one of lower priority, and no row that came later and started before its turn."""
        rows, priority = self._residency.rows, sequence.request.priority
        running = (rows.phase == PREFILL) | (rows.phase == DECODE)
        if (rows.priority[running] < priority).any():
            return True
        return not (running & (rows.priority == priority) & (rows.order > sequence.order)).any()

    def outlasts(self, sequence: Sequence, budget: int) -> bool:
        """Whether all other work would be done before the sequence, even if it started now.

        The work is what rows hold, in blocks x steps over the pool or in steps over the slots, whichever takes longer:
        no schedule is shorter, so whatever needs as many steps sets the end.
        """
        queue, left = self._residency.queue, sequence.num_left
        token_steps, outputs = float(queue.num_token_steps), queue.num_output_tokens
        if queue.num_open:
            typical = self._residency.lengths.typical()
            outputs += queue.num_open * typical
            token_steps += queue.num_open * typical * (queue.num_tokens / queue.num_sequences + typical / 2)
        if left < self._steps(token_steps, outputs):
            return False
        if self._rows is None:
            self._rows, self._shared = self._look_ahead(budget)
        rows = self._rows
        token_steps += float((rows.last * (rows.position + rows.last / 2)).sum())
        return left >= self._steps(token_steps, outputs + int(rows.last.sum()))

    def _steps(self, token_steps: float, outputs: int) -> float:
        """The fewest steps for so much work; a row's last block is half empty on the average."""
        config = self._config
        pool = (token_steps + outputs * config.block_size / 2) / (config.num_blocks * config.block_size)
        return max(pool, outputs / config.num_slots)

    def _work_ahead(self) -> int:
        """Tokens that running and waiting sequences are expected to compute."""
        assert self._rows is not None
        queue = self._residency.queue
        return (
            int(self._rows.last.sum())
            + queue.num_tokens
            + queue.num_output_tokens
            + queue.num_open * self._residency.lengths.typical()
        )

    def _look_ahead(self, budget: int) -> tuple[Outlook, int]:
        """The running rows as the forecast sees them, and how many blocks are in use beside their own."""
        rows, pool = self._residency.rows, self._residency.pool
        slots = np.flatnonzero(rows.phase)
        phase, scheduled, known = rows.phase[slots], rows.scheduled[slots], rows.known[slots]
        num_prompt, adopted = rows.num_prompt[slots], rows.num_adopted[slots]
        output = self._residency.lengths.expected(
            np.maximum(0, known - num_prompt), rows.limit[slots] - num_prompt, rows.may_stop[slots], rows.order[slots]
        )
        target = np.minimum(known, np.maximum(rows.limit[slots] - 1, num_prompt - 1))
        end = np.maximum(target, num_prompt + output - 1)  # tokens with keys and values when it ends
        steps = -((scheduled - target) // budget)
        prefill = phase == PREFILL
        position = np.where(prefill, target - steps, scheduled)
        last = np.where(prefill, steps - 1 + end - target, end - 1 - scheduled)
        last = np.maximum(0, np.where(phase == LEAVING, 0, last)) + self._config.pipeline_depth - 1
        own = int((rows.num_blocks[slots] - adopted).sum())
        shared = pool.num_blocks - pool.num_available - self._residency.num_held - own
        return Outlook(position, last, adopted), max(0, shared)
