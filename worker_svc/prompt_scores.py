"""Scores of prompt tokens computed in a step, on any device.

Knows which positions of a plan are scored and gathers their columns as `StepResult` has them. Invariant: all ranks make
the same calls of the model, since they follow from the plan alone; only rank 0 keeps scores.

Legend: T tokens, P prompt positions to score, V vocabulary.
"""

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from protos.step import NO_FLOATS, NO_INTS, Float32s, Int32s
from worker_svc.models import Decoder
from worker_svc.parallel.group import Group
from worker_svc.slots import StepPlan
from worker_svc.vocabulary_scores import score_tokens

Column = TypeVar("Column", Int32s, Float32s)

SCORED_AT_ONCE = 64  # prompt positions whose logits exist at a time


@dataclass(slots=True)
class PromptScores:
    """Columns as they grow over rows and pieces; `failed_slots` are rows whose logits held a NaN."""

    logprobs: list[Float32s] = field(default_factory=list)
    alternative_ids: list[Int32s] = field(default_factory=list)
    alternative_logprobs: list[Float32s] = field(default_factory=list)
    failed_slots: list[int] = field(default_factory=list)

    def add(self, model: Decoder, hidden_TD: torch.Tensor, plan: StepPlan, group: Group) -> None:
        """Scores of the prompt tokens that follow positions computed in this step, for rows that ask."""
        for r, row in enumerate(plan.rows):
            if row.prompt_logprobs is None:
                continue
            first = int(plan.first_position[r])
            last = min(first + int(plan.num_new[r]), row.num_prompt - 1)
            for begin in range(first, last, SCORED_AT_ONCE):
                end = min(begin + SCORED_AT_ONCE, last)
                at = int(plan.query_starts[r]) + begin - first
                targets = row.token_ids[begin + 1 : end + 1]
                hidden_PD = hidden_TD[at : at + end - begin]
                logprobs, ids, values = score_tokens(model, hidden_PD, targets, row.prompt_logprobs, group)
                if np.isnan(logprobs).any() and row.slot not in self.failed_slots:
                    self.failed_slots.append(row.slot)
                if group.rank == 0:
                    self.logprobs.append(logprobs.astype(np.float32))
                    self.alternative_ids.append(ids.ravel())
                    self.alternative_logprobs.append(values.astype(np.float32).ravel())

    def columns(self) -> tuple[Float32s, Int32s, Float32s]:
        """(logprobs, alternative ids, alternative logprobs) of all rows, flat."""
        return (
            _joined(self.logprobs, NO_FLOATS),
            _joined(self.alternative_ids, NO_INTS),
            _joined(self.alternative_logprobs, NO_FLOATS),
        )


def _joined(parts: list[Column], empty: Column) -> Column:
    return np.concatenate(parts) if parts else empty
