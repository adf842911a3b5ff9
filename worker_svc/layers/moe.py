"""A mixture of experts: every rank holds the router and a share of every expert's columns."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from worker_svc.layers.norm import Norm
from worker_svc.layers.parameter import Parameter, Slice, whole
from worker_svc.ops.base import Ops, Router, Update, Weight
from worker_svc.ops.leaves import leaf_part
from worker_svc.parallel.group import Group
from worker_svc.spec import ModelSpec, Shard


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Checkpoint names of an expert's three matrices."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class MixtureOfExperts:
    def __init__(
        self, spec: ModelSpec, shard: Shard, index: int, prefix: str, names: ExpertNames | None = None
    ) -> None:
        assert spec.moe is not None
        self._spec = spec
        self._moe = spec.moe
        self._prefix = prefix
        self._names = names or ExpertNames()
        self._columns = shard.part(spec.intermediate_size)
        self._leaves = leaf_part(spec.leaves, shard.rank, shard.tp)
        self._gate_up: Tensor | None = None
        self.router: Router
        self.experts: Weight = None

    def parameters(self) -> Iterator[Parameter]:
        hidden, names, count = self._spec.hidden_size, self._names, self._moe.num_experts
        full = (self._spec.intermediate_size, hidden)
        yield Parameter((whole(f"{self._prefix}gate.weight", count, hidden),), self._bind_router)
        gate_up, down = [], []
        for expert in range(count):
            at = f"{self._prefix}experts.{expert}."
            gate_up += [Slice(f"{at}{name}.weight", full, self._columns) for name in (names.gate, names.up)]
            down.append(Slice(f"{at}{names.down}.weight", full[::-1], self._columns, dim=1))
        yield Parameter(tuple(gate_up), lambda ops, t: setattr(self, "_gate_up", t.view(count, -1, hidden)))
        yield Parameter(tuple(down), self._bind_experts)

    def add_norm(self, ops: Ops, update: Update, residual_TD: Tensor, norm: Norm) -> tuple[Any, Tensor]:
        return ops.add_norm_route(update, residual_TD, norm.weight, norm.eps, self.router)

    def forward(self, ops: Ops, x_TD: Any, group: Group) -> Update:
        return ops.moe(x_TD, self.router, self.experts, group)

    def _bind_router(self, ops: Ops, weight_XD: Tensor) -> None:
        self.router = Router(ops.prepare_router(weight_XD), self._moe.experts_per_token, self._moe.renormalise)

    def _bind_experts(self, ops: Ops, down: Tensor) -> None:
        assert self._gate_up is not None
        stacked = down.view(self._moe.num_experts, self._spec.hidden_size, -1)
        self.experts = ops.prepare_experts(self._gate_up, stacked, self._leaves)
        self._gate_up = None
