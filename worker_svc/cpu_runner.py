"""The runner on a CPU: a step is done when `launch` returns.

Knows how a plan becomes hidden states, logits and drawn tokens, and which rows' numbers leave the rank. Does not know
families, kernels or the rules by which a token is drawn. Invariant: every rank makes the same collective calls in the
same order, since what it calls follows from the plan alone; only rank 0 keeps what only the scheduler reads (logits,
prompt scores).

Legend: T tokens, S sampling rows, L columns of this rank.
"""

from dataclasses import dataclass

import numpy as np
import torch

from protos.step import NO_FLOATS, NO_INTS, Description, Floats, GroupConfig, StepBatch, StepResult
from worker_svc import step_inputs
from worker_svc.drawing import draw
from worker_svc.kv_cache import KVCache, blocks_in
from worker_svc.models import Decoder
from worker_svc.parallel.group import Group
from worker_svc.prompt_scores import PromptScores
from worker_svc.sampling import Drawn, SamplerRow
from worker_svc.slots import SlotTable, StepPlan
from worker_svc.spec import Shard


@dataclass(frozen=True, slots=True)
class Done:
    """A step that has no more to wait for."""

    value: StepResult

    def result(self) -> StepResult:
        return self.value


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
        spec, shard, dtype = self._model.spec, Shard(group.rank, group.tp), getattr(torch, facts.kv_dtype)
        fitting = blocks_in(facts.memory_bytes, spec, shard, dtype.itemsize, config.block_size)
        num_blocks = config.num_blocks or max(1, fitting)
        self._cache = None  # two at once may not fit
        self._cache = KVCache(spec, num_blocks, config.block_size, dtype=dtype, shard=shard)
        self._config = config
        self._group = group
        self._slots = SlotTable(
            config.max_num_seqs,
            -(-config.max_seq_len // config.block_size),
            block_size=config.block_size,
            num_blocks=num_blocks,
            vocab_size=facts.vocab_size,
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
            scores = PromptScores()
            scores.add(self._model, hidden_TD, plan, self._group)
            local_SL = self._model.local_logits(hidden_TD[inputs.sample_tokens_S]) if plan.samples.any() else None
            if local_SL is None:
                return Done(self._result(batch, scores))
            if self._config.sample_at_scheduler:
                gathered = self._model.gather_logits(local_SL, self._group)
                return Done(self._result(batch, scores, logits=gathered.numpy()))
            drawn, logits = self._draw(plan, local_SL)
        return Done(self._result(batch, scores, drawn, logits))

    def _draw(self, plan: StepPlan, local_SL: torch.Tensor) -> tuple[Drawn, Floats | None]:
        """Draw, and make what was drawn known to the next step."""
        rows = [self._samplers[slot] for slot in plan.slots[plan.samples].tolist()]
        drawn, logits = draw(self._model, local_SL, rows, self._group)
        # a row that failed runs on with any token until it is retired; nobody reads what it says
        known = np.maximum(drawn.token_ids, 0)
        self._slots.drawn(plan, known)
        for row, token in zip(rows, known.tolist()):
            row.append(token)
        return drawn, logits

    def _result(
        self, batch: StepBatch, scores: PromptScores, drawn: Drawn | None = None, logits: Floats | None = None
    ) -> StepResult:
        failed = sorted({*scores.failed_slots, *(drawn.failed_slots.tolist() if drawn is not None else ())})
        prompt_logprobs, prompt_ids, prompt_values = scores.columns()
        return StepResult(
            batch.epoch,
            batch.seq,
            digest=0,
            token_ids=drawn.token_ids if drawn is not None else NO_INTS,
            logprobs=drawn.logprobs if drawn is not None else NO_FLOATS,
            alternative_ids=drawn.alternative_ids if drawn is not None else NO_INTS,
            alternative_logprobs=drawn.alternative_logprobs if drawn is not None else NO_FLOATS,
            prompt_logprobs=prompt_logprobs,
            prompt_alternative_ids=prompt_ids,
            prompt_alternative_logprobs=prompt_values,
            failed_slots=np.array(failed, np.int32),
            logits=logits if self._group.rank == 0 else None,
        )
