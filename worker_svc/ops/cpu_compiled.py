"""`Ops` on CPU with compiled row-wise steps: what serves float32 and bfloat16 where numba is installed.

Knows how tensors are handed to `compiled.py` without a copy. Products go the same way as in `cpu.py`, which is the
plain twin of everything here. Invariant: as there; besides, no bit depends on how a step's rows are cut among threads.
"""

from array import array
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.kv_cache import KVCache, LayerCache
from worker_svc.ops import compiled
from worker_svc.ops.attention_tiles import attention_tiles
from worker_svc.ops.base import HeadShape, QKNorm
from worker_svc.ops.companion import companion
from worker_svc.ops.cpu import CpuOps, RopeTables, RowWeight
from worker_svc.ops.invariance import Numerics
from worker_svc.ops.matmul import CpuWeight, gated_matmul, matmul
from worker_svc.parallel.group import Group
from worker_svc.step_inputs import HostStep, StepInputs, positions_of

Array = NDArray[Any]
HALF = torch.bfloat16


def as_array(x: Tensor) -> Array:
    """The tensor's own memory; bfloat16 as int16 bits."""
    array: Array = x.view(torch.int16).numpy() if x.dtype == HALF else x.numpy()
    return array


SEGMENT = 64  # tokens of one row that one thread attends
WORTH_A_CHUNK = 1_500  # pairs of a query head and a key, about 10 us
CHUNKS_A_THREAD = 4


class CompiledStep:
    """One step as arrays: positions, places in the pool, and segments of rows, cut among threads by their work."""

    def __init__(self, host: HostStep, cache: KVCache, rope: RopeTables) -> None:
        positions = positions_of(host.first_position, host.num_new, host.query_starts)
        rows = np.repeat(np.arange(host.num_rows), host.num_new)
        size = cache.block_size
        places = host.block_tables[rows, positions // size].astype(np.int64) * size + positions % size
        self.positions = np.ascontiguousarray(positions, np.int64)
        self.places = np.where(positions < host.num_cached[rows], -1, places)
        self.segments = _segments(host)
        tokens, first = self.segments[:, 2], self.segments[:, 3]
        self._work = np.cumsum(tokens * (first + tokens))
        self.tables = np.ascontiguousarray(host.block_tables, np.int32)
        self.cos, self.sin = as_array(rope.cos), as_array(rope.sin)
        self.layers = {id(layer): (as_array(layer.keys), as_array(layer.values)) for layer in cache.layers}

    def cuts(self, num_heads: int, threads: int) -> list[int]:
        """Edges between ranges of segments with about equal work, as many as are worth a helper's while."""
        total = int(self._work[-1])
        parts = max(1, min(CHUNKS_A_THREAD * threads, total * num_heads // WORTH_A_CHUNK, len(self.segments)))
        if threads == 1 or parts == 1:
            return [0, len(self.segments)]
        bounds = np.searchsorted(self._work, [total * i // parts for i in range(1, parts)]) + 1
        return sorted({0, *bounds.tolist(), len(self.segments)})


def _segments(host: HostStep) -> NDArray[np.int64]:
    """[S, 4]: row, first token, number of tokens, position of the first."""
    pieces = -(-host.num_new // SEGMENT)
    row = np.repeat(np.arange(host.num_rows), pieces)
    offset = (np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * SEGMENT
    count = np.minimum(SEGMENT, host.num_new[row] - offset)
    columns = (row, host.query_starts[row] + offset, count, host.first_position[row] + offset)
    return np.stack(columns, axis=1).astype(np.int64)


class CompiledCpuOps(CpuOps):
    def __init__(self, dtype: torch.dtype, numerics: Numerics) -> None:
        assert dtype in (torch.float32, torch.bfloat16), dtype
        super().__init__(dtype, numerics)
        self._tiles = attention_tiles()
        self._views: dict[int, tuple[Tensor, Array]] = {}
        self._none = np.zeros(0, np.int16 if dtype == HALF else np.float32)
        self._no_leaves = np.zeros((0, 0, 0), self._none.dtype)

    def prepare_rope(self, cos_PE: Tensor, sin_PE: Tensor) -> RopeTables:
        return RopeTables(cos_PE.contiguous(), sin_PE.contiguous())

    def begin(self, inputs: StepInputs, cache: KVCache, rope: RopeTables) -> CompiledStep:  # type: ignore[override]
        return CompiledStep(inputs.host, cache, rope)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x = x_TD.contiguous()
        normed = torch.empty_like(x)
        add_norm = compiled.add_norm
        given = as_array(x)
        add_norm(self._no_leaves, given, self._view(weight_D), np.float32(eps), given, as_array(normed))
        return normed

    def add_rms_norm(self, update: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        leaves = update if update.dim() == 3 else update.unsqueeze(0)
        residual, normed = torch.empty_like(residual_TD), torch.empty_like(residual_TD)
        compiled.add_norm(
            as_array(leaves),
            as_array(residual_TD),
            self._view(weight_D),
            np.float32(eps),
            as_array(residual),
            as_array(normed),
        )
        return normed, residual

    def gated_linear(self, x_TK: Tensor, weight: CpuWeight) -> Tensor:
        if weight.packed is not None:
            return gated_matmul(x_TK, weight)
        gate_up = matmul(x_TK, weight)
        out = torch.empty((len(gate_up), gate_up.shape[1] // 2), dtype=self.dtype)
        compiled.silu_mul(as_array(gate_up), as_array(out))
        return out

    def row_linear(self, x_TK: Tensor, weight: RowWeight, group: Group) -> Tensor:
        """[L, T, D], still to be folded, or [1, T, D] where other ranks or a bias had a part in it."""
        if group.tp > 1 or weight.bias_N is not None:
            return self._total(x_TK, weight, group).unsqueeze(0)
        if len(weight.leaves) == 1:
            return matmul(x_TK, weight.leaves[0]).unsqueeze(0)
        parts = x_TK.chunk(len(weight.leaves), 1)
        return torch.stack([matmul(part, leaf) for part, leaf in zip(parts, weight.leaves, strict=True)])

    def qkv_rope_write(  # type: ignore[override]
        self,
        qkv_TN: Tensor,
        norm: QKNorm | None,
        clip: float | None,
        shape: HeadShape,
        cache: LayerCache,
        step: CompiledStep,
    ) -> Array:
        keys, values = step.layers[id(cache)]
        queries = np.empty((len(qkv_TN), shape.num_heads, shape.head_dim), np.float32)
        compiled.rope_write(
            as_array(qkv_TN), shape.num_heads, shape.head_dim,
            self._none if norm is None else self._view(norm.query),
            self._none if norm is None else self._view(norm.key),
            norm is not None, np.float32(0 if norm is None else norm.eps), np.float32(clip or 0),
            step.cos, step.sin, step.positions, step.places, np.float32(shape.scale), keys, values, queries,
        )  # fmt: skip
        return queries

    def attention(self, queries: Array, shape: HeadShape, cache: LayerCache, step: CompiledStep) -> Tensor:  # type: ignore[override]
        keys, values = step.layers[id(cache)]
        out = torch.empty(queries.shape, dtype=self.dtype)
        target, threads = as_array(out), torch.get_num_threads()
        edges = step.cuts(shape.num_heads, threads)
        if len(edges) == 2:
            compiled.attend(
                queries, keys, values, step.tables, step.segments, shape.window, self._tiles, 0, edges[1], target
            )
            return out.view(len(out), -1)
        places = array("q", edges)
        job = array(
            "q",
            (
                *(a.ctypes.data for a in (queries, target, keys, values, step.tables, step.segments, self._tiles)),
                places.buffer_info()[0], *queries.shape, *keys.shape[:3], *step.tables.shape, len(step.segments),
                len(edges) - 1, shape.window,
            ),
        )  # fmt: skip
        function = compiled.attend_job(keys.dtype == np.int16, target.dtype == np.int16)
        companion().run(function, job.buffer_info()[0], len(edges) - 1, threads)
        return out.view(len(out), -1)

    def warm_up(self, cache_dtype: torch.dtype) -> None:
        """Compile every loop now, or load it from the compiler's cache, so that no step waits for it."""
        one = torch.ones(1, 2, dtype=self.dtype)
        bits, single = as_array(one), np.ones((1, 2), np.float32)
        cache = as_array(torch.zeros(1, 1, 1, 2, dtype=cache_dtype))
        for leaves in (bits[None], single[None]):
            compiled.add_norm(leaves, bits, bits[0], np.float32(1), bits.copy(), bits.copy())
        compiled.silu_mul(bits, as_array(torch.empty(1, 1, dtype=self.dtype)))
        queries, place = np.empty((1, 1, 2), np.float32), np.zeros(1, np.int64)
        compiled.rope_write(
            as_array(torch.ones(1, 6, dtype=self.dtype)), 1, 2, bits[0], bits[0], False, np.float32(1), np.float32(0),
            single, single, place, place, np.float32(1), cache, cache.copy(), queries,
        )  # fmt: skip
        out = as_array(torch.empty(1, 1, 2, dtype=self.dtype))
        segments = np.array([[0, 0, 1, 0]], np.int64)
        tables = np.zeros((1, 1), np.int32)
        compiled.attend(queries, cache, cache.copy(), tables, segments, 0, self._tiles, 0, 1, out)
        compiled.attend_job(cache.dtype == np.int16, out.dtype == np.int16)

    def _view(self, weight: Tensor) -> Array:
        """The array of a tensor that stays: made once."""
        known = self._views.get(id(weight))
        if known is None or known[0] is not weight:
            known = self._views[id(weight)] = (weight, as_array(weight))
        return known[1]
