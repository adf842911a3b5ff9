"""The runner on a CPU: a step is done when `launch` returns.

Knows how a plan becomes hidden states, logits and drawn tokens, and which rows' numbers leave the rank. Does not know
families, kernels or the sampler's rules. Invariant: every rank makes the same collective calls in the same order, since
what it calls follows from the plan alone; only rank 0 keeps what only the scheduler reads (logits, prompt scores).

Legend: T tokens, S sampling rows, P prompt positions to score, V vocabulary.
"""

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from protos.step import NO_FLOATS, NO_INTS, Description, Float32s, Floats, GroupConfig, Int32s, StepBatch, StepResult
from worker_svc import step_inputs
from worker_svc.kv_cache import KVCache
from worker_svc.models import Decoder
from worker_svc.parallel.group import Group
from worker_svc.sampling import Drawn, SamplerRow, sample, score
from worker_svc.slots import SlotTable, StepPlan
from worker_svc.spec import Shard

Column = TypeVar("Column", Int32s, Float32s)

SCORED_AT_ONCE = 64  # prompt positions whose whole logits exist at a time


@dataclass(frozen=True, slots=True)
class Done:
    """A step that has no more to wait for."""

    value: StepResult

    def result(self) -> StepResult:
        return self.value


@dataclass(slots=True)
class _Scores:
    """Columns of prompt scores as they grow over rows and pieces."""

    logprobs: list[Float32s] = field(default_factory=list)
    alternative_ids: list[Int32s] = field(default_factory=list)
    alternative_logprobs: list[Float32s] = field(default_factory=list)
    failed_slots: list[int] = field(default_factory=list)


class CpuRunner:
    """Args:
    model: this rank's shard.
    description: its facts.
    """

    def __init__(self, model: Decoder, description: Description) -> None:
        self._model = model
        self._description = description
        self._cache: KVCache | None = None

    def describe(self) -> Description:
        return self._description

    def join(self, config: GroupConfig, group: Group) -> int:
        facts = self._description
        num_blocks = config.num_blocks or max(1, facts.memory_bytes // (facts.kv_bytes_per_token * config.block_size))
        self._cache = None  # two at once may not fit
        self._cache = KVCache(
            self._model.spec,
            num_blocks,
            config.block_size,
            dtype=self._model.ops.dtype,
            shard=Shard(group.rank, group.tp),
        )
        self._config = config
        self._group = group
        self._slots = SlotTable(
            config.max_num_seqs,
            -(-config.max_seq_len // config.block_size),
            block_size=config.block_size,
            num_blocks=num_blocks,
        )
        self._samplers: dict[int, SamplerRow] = {}
        return num_blocks

    def launch(self, batch: StepBatch) -> Done:
        assert self._cache is not None
        plan = self._slots.apply(batch)
        for slot in batch.retired.tolist():
            self._samplers.pop(slot, None)
        if not self._config.sample_at_scheduler:
            self._samplers.update((row.slot, SamplerRow(row)) for row in batch.rows)
        if not len(plan.slots):
            return Done(StepResult(batch.epoch, batch.seq, 0))
        with torch.inference_mode():
            inputs = step_inputs.build(plan)
            hidden_TD = self._model.forward(inputs, self._cache, self._group)
            scores = self._score_prompts(plan, hidden_TD)
            sampling = plan.samples.any()
            logits_SV = self._model.logits(hidden_TD[inputs.sample_tokens_S], self._group) if sampling else None
        if self._config.sample_at_scheduler:
            return Done(self._result(batch, scores, logits=None if logits_SV is None else logits_SV.numpy()))
        drawn = self._draw(plan, logits_SV) if logits_SV is not None else None
        wanted = [row.sampling.return_logits for row, samples in zip(plan.rows, plan.samples) if samples]
        rows = None if logits_SV is None or not any(wanted) else logits_SV.numpy()[np.array(wanted)]
        return Done(self._result(batch, scores, drawn, rows))

    def _draw(self, plan: StepPlan, logits_SV: torch.Tensor) -> Drawn:
        """Draw, and make what was drawn known to the next step."""
        rows = [self._samplers[slot] for slot in plan.slots[plan.samples].tolist()]
        drawn = sample(logits_SV, rows)
        # a row that failed runs on with any token until it is retired; nobody reads what it says
        known = np.maximum(drawn.token_ids, 0)
        self._slots.drawn(plan, known)
        for row, token in zip(rows, known.tolist()):
            row.append(token)
        return drawn

    def _score_prompts(self, plan: StepPlan, hidden_TD: torch.Tensor) -> _Scores:
        """Scores of the prompt tokens that follow positions computed in this step, for rows that ask."""
        scores = _Scores()
        for r, row in enumerate(plan.rows):
            if row.prompt_logprobs is None:
                continue
            first = int(plan.first_position[r])
            last = min(first + int(plan.num_new[r]), row.num_prompt - 1)
            for begin in range(first, last, SCORED_AT_ONCE):
                end = min(begin + SCORED_AT_ONCE, last)
                at = int(plan.query_starts[r]) + begin - first
                logits_PV = self._model.logits(hidden_TD[at : at + end - begin], self._group)
                if not bool(logits_PV.amax(-1).isfinite().all()) and row.slot not in scores.failed_slots:
                    scores.failed_slots.append(row.slot)
                if self._group.rank == 0:
                    targets = row.token_ids[begin + 1 : end + 1]
                    logprobs, ids, values = score(logits_PV, targets, row.prompt_logprobs)
                    scores.logprobs.append(logprobs)
                    scores.alternative_ids.append(ids)
                    scores.alternative_logprobs.append(values)
        return scores

    def _result(
        self, batch: StepBatch, scores: _Scores, drawn: Drawn | None = None, logits: Floats | None = None
    ) -> StepResult:
        failed = sorted({*scores.failed_slots, *(drawn.failed_slots.tolist() if drawn is not None else ())})
        return StepResult(
            batch.epoch,
            batch.seq,
            digest=0,
            token_ids=drawn.token_ids if drawn is not None else NO_INTS,
            logprobs=drawn.logprobs if drawn is not None else NO_FLOATS,
            alternative_ids=drawn.alternative_ids if drawn is not None else NO_INTS,
            alternative_logprobs=drawn.alternative_logprobs if drawn is not None else NO_FLOATS,
            prompt_logprobs=_joined(scores.logprobs, NO_FLOATS),
            prompt_alternative_ids=_joined(scores.alternative_ids, NO_INTS),
            prompt_alternative_logprobs=_joined(scores.alternative_logprobs, NO_FLOATS),
            failed_slots=np.array(failed, np.int32),
            logits=logits if self._group.rank == 0 else None,
        )


def _joined(parts: list[Column], empty: Column) -> Column:
    return np.concatenate(parts) if parts else empty
