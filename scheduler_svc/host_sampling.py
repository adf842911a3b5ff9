"""Sampling at the scheduler: an executor whose workers answer with gathered logits, and whose tokens are drawn here.

Knows the slot table as a worker would (`worker_svc.slots`) and one sampler row a slot; nothing of the network, models
or the core. Invariant: the results that leave are those of sampling at the worker, column for column, because both
call the one `worker_svc.sampling.sample`. Needs each step's logits before the next, so it runs at depth 1.
"""

from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from protos.step import GroupConfig, StepBatch, StepResult, step_digest
from scheduler_svc.executor import EpochLost, Executor, ExecutorOver
from worker_svc.sampling import SamplerRow, sample, warm_up
from worker_svc.slots import Contradiction, SlotTable, StepPlan


class HostSampler:
    """The sampling state of one epoch: `apply` each batch in order, then `draw` from that step's logits."""

    def __init__(self, config: GroupConfig) -> None:
        self._table = SlotTable(config.max_num_seqs, -(-config.max_seq_len // config.block_size))
        self._rows: dict[int, SamplerRow] = {}

    def apply(self, batch: StepBatch) -> StepPlan:
        """What the step will compute. Raises worker_svc.slots.Contradiction."""
        plan = self._table.apply(batch)
        for slot in batch.retired.tolist():
            self._rows.pop(slot, None)
        for row in batch.rows:
            self._rows[row.slot] = SamplerRow(row)
        for slot, token in zip(batch.fed_slots.tolist(), batch.fed_token_ids.tolist()):
            self._rows[slot].append(token)
        return plan

    def draw(self, plan: StepPlan, result: StepResult) -> StepResult:
        """The step's result as sampling at the worker gives it; only rows that ask keep their logits."""
        rows = [self._rows[slot] for slot in plan.slots[plan.samples].tolist()]
        if not rows:
            return result
        logits = result.logits
        assert logits is not None and len(logits) == len(rows), "a logits row for each sampling row"
        drawn = sample(logits, rows)
        failed = np.union1d(result.failed_slots, drawn.failed_slots).astype(np.int32)
        asking = [row.sampling.return_logits for row in rows]
        return replace(
            result,
            token_ids=drawn.token_ids,
            logprobs=drawn.logprobs,
            alternative_ids=drawn.alternative_ids,
            alternative_logprobs=drawn.alternative_logprobs,
            failed_slots=failed,
            logits=logits[asking] if any(asking) else None,
            digest=step_digest(result.epoch, result.seq, drawn.token_ids, drawn.logprobs, failed),
        )


class HostSampling(ExecutorOver):
    """An Executor over another one."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self._sampler: HostSampler | None = None

    def join(self, config: GroupConfig) -> int:
        assert config.sample_at_scheduler and config.pipeline_depth == 1
        warm_up()
        num_blocks = self._executor.join(config)
        self._sampler = HostSampler(config)
        return num_blocks

    def step(self, batch: StepBatch) -> Future[StepResult]:
        drawn: Future[StepResult] = Future()
        sampler = self._sampler
        if sampler is None:
            drawn.set_exception(EpochLost("no epoch is joined"))
            return drawn
        try:
            plan = sampler.apply(batch)
        except Contradiction as error:
            drawn.set_exception(EpochLost(str(error)))
            return drawn

        def draw(done: Future[StepResult]) -> None:
            try:
                drawn.set_result(sampler.draw(plan, done.result()))
            except Exception as error:
                drawn.set_exception(error)

        self._executor.step(batch).add_done_callback(draw)
        return drawn
