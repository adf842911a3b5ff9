"""The gated feed-forward layer: fused gate and up rows split by column, down columns split by leaf."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from worker_svc.layers.norm import Norm
from worker_svc.layers.parameter import Parameter, Slice
from worker_svc.ops.base import Ops, Update, Weight
from worker_svc.ops.leaves import leaf_part
from worker_svc.parallel.group import Group
from worker_svc.spec import ModelSpec, Shard


class GatedMLP:
    def __init__(self, spec: ModelSpec, shard: Shard, index: int, prefix: str) -> None:
        self._spec = spec
        self._prefix = prefix
        self._columns = shard.part(spec.intermediate_size)
        self._leaves = leaf_part(spec.leaves, shard.rank, shard.tp)
        self.gate_up: Weight = None
        self.down: Weight = None

    def parameters(self) -> Iterator[Parameter]:
        full = (self._spec.intermediate_size, self._spec.hidden_size)
        rows = tuple(Slice(f"{self._prefix}{name}.weight", full, self._columns) for name in ("gate_proj", "up_proj"))
        yield Parameter(rows, lambda ops, t: setattr(self, "gate_up", ops.prepare_gated(t)))
        down = Slice(f"{self._prefix}down_proj.weight", full[::-1], self._columns, dim=1)
        yield Parameter((down,), lambda ops, t: setattr(self, "down", ops.prepare_row(t, None, self._leaves)))

    def add_norm(self, ops: Ops, update: Update, residual_TD: Tensor, norm: Norm) -> tuple[Any, Tensor]:
        return ops.add_rms_norm(update, residual_TD, norm.weight, norm.eps)

    def forward(self, ops: Ops, x_TD: Tensor, group: Group) -> Update:
        return ops.row_linear(ops.gated_linear(x_TD, self.gate_up), self.down, group)
