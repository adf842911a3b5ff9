"""Mixture of experts on CPU."""

from dataclasses import dataclass
from typing import Any

from worker_svc.ops.leaves import LeafPart
from worker_svc.ops.matmul import CpuWeight


@dataclass(frozen=True, eq=False, slots=True)
class Experts:
    gate_up: tuple[CpuWeight, ...]
    down: tuple[Any, ...]
    part: LeafPart
