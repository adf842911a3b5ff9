"""One step as tensors: what layers and attention need of a `StepPlan`.

Knows positions, rows and block tables. Does not know slots' history, sampling or the model. Invariant: T tokens in row
order; every length is a tensor on the device and the same fact on the host, so no layer asks the device for a number.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.slots import StepPlan

Ints = NDArray[np.integer]


@dataclass(frozen=True, eq=False, slots=True)
class HostStep:
    """The same step as numpy columns, for decisions on the host."""

    query_starts: Ints  # [R + 1]
    first_position: Ints  # [R]
    num_new: Ints  # [R]
    block_tables: Ints  # [R, B]; entries past a row's blocks mean nothing
    samples: NDArray[np.bool_]  # [R]
    num_cached: Ints  # [R] positions below it are in shared blocks and are not written

    @property
    def num_rows(self) -> int:
        return len(self.num_new)

    @property
    def num_tokens(self) -> int:
        return int(self.query_starts[-1])

    @property
    def max_position(self) -> int:
        """-1 for an empty step."""
        return int((self.first_position + self.num_new).max(initial=0)) - 1


@dataclass(frozen=True, eq=False, slots=True)
class StepInputs:
    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    query_starts: Tensor  # [R + 1] int32
    context_lens_R: Tensor  # int32, tokens computed after the step
    num_cached_R: Tensor  # int32
    block_tables_RB: Tensor  # int32
    sample_tokens_S: Tensor  # int64, index into T of each sampling row's last token
    host: HostStep


def positions_of(first_position: Ints, num_new: Ints, query_starts: Ints) -> Ints:
    return np.arange(int(query_starts[-1])) + np.repeat(first_position - query_starts[:-1], num_new)


def build(plan: StepPlan, device: torch.device | str = "cpu") -> StepInputs:
    """Tensors of the plan on the device. Token ids of -1 (known to the device only) are the runner's to fill."""
    host = HostStep(
        plan.query_starts, plan.first_position, plan.num_new, plan.block_tables, plan.samples, plan.num_cached
    )
    last = plan.query_starts[1:][plan.samples] - 1

    def tensor(values: Ints, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device=device, dtype=dtype, copy=True)

    return StepInputs(
        token_ids_T=tensor(plan.token_ids, torch.int64),
        positions_T=tensor(positions_of(plan.first_position, plan.num_new, plan.query_starts), torch.int64),
        query_starts=tensor(plan.query_starts, torch.int32),
        context_lens_R=tensor(plan.first_position + plan.num_new, torch.int32),
        num_cached_R=tensor(plan.num_cached, torch.int32),
        block_tables_RB=tensor(plan.block_tables, torch.int32),
        sample_tokens_S=tensor(last, torch.int64),
        host=host,
    )
