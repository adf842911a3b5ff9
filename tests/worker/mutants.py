"""Deliberate faults, switched on inside a process: each must make the test that names it fail.

A mutant is a context manager that patches the worker's code; nothing here is used outside tests.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import numba
import torch

from worker_svc.attention import work
from worker_svc.layers import attention as attention_layer
from worker_svc.layers.mlp import GatedMLP
from worker_svc.layers.parameter import Parameter
from worker_svc.models import dense
from worker_svc.ops import compiled, cpu, cpu_compiled, moe
from worker_svc.ops.leaves import LeafPart, fold
from worker_svc.parallel.group import SingleGroup
from worker_svc.spec import RopeSpec, Shard

MUTANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {}


def mutant(function: Callable[[], Iterator[None]]) -> Callable[[], AbstractContextManager[None]]:
    made = contextmanager(function)
    MUTANTS[function.__name__] = made
    return made


@mutant
def drop_last_key() -> Iterator[None]:
    """A query does not see its own key."""
    honest = work._pass

    def without_own(host: Any, *args: Any) -> work.Pass:
        made = honest(host, *args)
        hidden = made.hidden_WQS.clone()
        own = hidden.logical_not().long().cumsum(-1).argmax(-1, keepdim=True)
        return dataclasses.replace(made, hidden_WQS=hidden.scatter(-1, own, True))

    honest_segments = cpu_compiled._segments

    def one_less(host: Any) -> Any:
        segments = honest_segments(host)
        segments[:, 3] -= 1
        return segments

    with mock.patch.object(work, "_pass", without_own), mock.patch.object(cpu_compiled, "_segments", one_less):
        yield


@mutant
def ignore_block_offset() -> Iterator[None]:
    """Every token of a block is written to the block's first place."""
    honest = cpu_compiled.CompiledStep.__init__

    def first_place(self: Any, host: Any, cache: Any, rope: Any) -> None:
        honest(self, host, cache, rope)
        self.places = self.places // cache.block_size * cache.block_size

    with mock.patch.object(cpu_compiled.CompiledStep, "__init__", first_place):
        yield


@mutant
def mirrored_slice() -> Iterator[None]:
    """Ranks hold each other's columns of down_proj."""
    honest = GatedMLP.parameters

    def mirrored(self: Any) -> Iterator[Parameter]:
        gate_up, down = honest(self)
        (part,) = down.slices
        stop = part.shape[1] - part.part.start
        yield gate_up
        yield dataclasses.replace(down, slices=(dataclasses.replace(part, part=range(stop - len(part.part), stop)),))

    with mock.patch.object(GatedMLP, "parameters", mirrored):
        yield


@mutant
def skipped_reduce() -> Iterator[None]:
    """A rank adds its own leaves only."""
    with mock.patch.object(cpu, "fold_across", lambda leaves, part, group: fold(leaves)):
        yield


@mutant
def library_reduce() -> Iterator[None]:
    """gloo adds, in an order of its own."""

    def reduced(leaves: Any, part: Any, group: Any) -> torch.Tensor:
        return group.all_reduce(fold(leaves).clone())

    with mock.patch.object(cpu, "fold_across", reduced):
        yield


@mutant
def mirrored_kv_heads() -> Iterator[None]:
    honest = Shard.kv_heads

    def mirrored(self: Shard, total: int) -> range:
        return honest(Shard(self.tp - 1 - self.rank, self.tp), total)

    with mock.patch.object(Shard, "kv_heads", mirrored):
        yield


@mutant
def chunk_aligned_splits() -> Iterator[None]:
    """Prefill cuts keys at other places than decode."""
    honest = compiled.attend
    other = numba.njit(nogil=True, error_model="numpy")(honest.py_func)  # not cached: it is compiled with the patch

    def attend(queries: Any, keys: Any, values: Any, tables: Any, segments: Any, *rest: Any) -> None:
        chosen = honest if (segments[:, 2] == 1).all() else other
        chosen(queries, keys, values, tables, segments, *rest)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several share the honest loop out by its address
    with mock.patch.object(compiled, "SPLIT", 64), mock.patch.object(compiled, "attend", attend):
        try:
            yield
        finally:
            torch.set_num_threads(threads)


@mutant
def rows_decide_the_path() -> Iterator[None]:
    """A single row goes through another product than many."""
    honest = cpu.matmul

    def split_by_rows(x: torch.Tensor, weight: Any) -> torch.Tensor:
        if len(x) > 1:
            return honest(x, weight)
        return torch.stack([honest(part, weight) for part in _halves(x)]).sum(0)

    with mock.patch.object(cpu, "matmul", split_by_rows), mock.patch.object(cpu_compiled, "matmul", split_by_rows):
        yield


def _halves(x: torch.Tensor) -> list[torch.Tensor]:
    first = x.clone()
    first[:, x.shape[1] // 2 :] = 0
    return [first, x - first]


@mutant
def ignored_rope_kind() -> Iterator[None]:
    honest = dense.read_rope
    with mock.patch.object(dense, "read_rope", lambda config: RopeSpec(theta=honest(config).theta)):
        yield


@mutant
def dropped_bias() -> Iterator[None]:
    honest = cpu.CpuOps.prepare_column
    with mock.patch.object(cpu.CpuOps, "prepare_column", lambda self, w, b: honest(self, w, None)):
        yield


@mutant
def window_off_by_one() -> Iterator[None]:
    honest = attention_layer.HeadShape

    def wider(heads: int, kv_heads: int, head_dim: int, window: int) -> Any:
        return honest(heads, kv_heads, head_dim, window + 1 if window else 0)

    with mock.patch.object(attention_layer, "HeadShape", wider):
        yield


@mutant
def flipped_renormalisation() -> Iterator[None]:
    honest = moe.choose
    with mock.patch.object(moe, "choose", lambda logits, slots, flag: honest(logits, slots, not flag)):
        yield


@mutant
def local_full_norm() -> Iterator[None]:
    """A rank norms what it holds."""
    honest = cpu.CpuOps.full_norm

    def local(self: Any, x: Any, weight: Any, eps: float, part: Any, group: Any) -> torch.Tensor:
        return honest(self, x, weight, eps, LeafPart(0, part.count, part.count), SingleGroup())

    with mock.patch.object(cpu.CpuOps, "full_norm", local):
        yield


@mutant
def unclipped() -> Iterator[None]:
    honest = cpu_compiled.CompiledCpuOps.qkv_rope_write

    def without(self: Any, qkv: Any, norm: Any, clip: Any, *args: Any) -> Any:
        return honest(self, qkv, norm, None, *args)

    with mock.patch.object(cpu_compiled.CompiledCpuOps, "qkv_rope_write", without):
        yield


@mutant
def experts_in_order_of_arrival() -> Iterator[None]:
    """Answers are added expert by expert, the busiest first."""

    def arrival(answers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = range(weights.shape[1]) if len(answers) % 2 else reversed(range(weights.shape[1]))
        parts = [answers[:, slot] * weights[:, slot : slot + 1] for slot in order]
        return functools.reduce(torch.add, parts)

    with mock.patch.object(moe, "combine", arrival):
        yield
