"""`Ops` on CPU in torch: the plain implementation, in float32, float64 and bfloat16.

Knows how each op is spelled with torch calls whose bits the self-test has checked. Does not know families or ranks'
shares. Sums and elementwise steps are done in fp32 (fp64 for fp64 models) and rounded once; for bfloat16 a library
rounds a product as it leaves it, so there each leaf of a row-parallel sum is rounded before the fold.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.attention.paged import attend
from worker_svc.attention.work import Pass, passes
from worker_svc.kv_cache import KVCache, LayerCache
from worker_svc.ops import moe
from worker_svc.ops.base import HeadShape, QKNorm, Router
from worker_svc.ops.invariance import Numerics, accumulator, probe, rms_norm, silu_mul
from worker_svc.ops.leaves import LeafPart, fold_across
from worker_svc.ops.matmul import CpuWeight, gated_matmul, leaf_matmuls, matmul, prepare, table_rows, wide_matmul
from worker_svc.parallel.group import Group
from worker_svc.step_inputs import HostStep, StepInputs


@dataclass(frozen=True, eq=False, slots=True)
class RowWeight:
    leaves: tuple[CpuWeight, ...]  # one that knows of its leaves where the product is our own
    bias_N: Tensor | None
    part: LeafPart


@dataclass(frozen=True, eq=False, slots=True)
class RopeTables:
    """cos and sin side by side for both halves of a head: [P, 1, E], the first half of sin negated."""

    cos: Tensor
    sin: Tensor


class CpuStep:
    """One step: rotary rows, where keys are written, and the work list of each window."""

    def __init__(self, inputs: StepInputs, cache: KVCache, rope: RopeTables) -> None:
        positions = inputs.positions_T
        self.cos_T1E = rope.cos.index_select(0, positions)
        self.sin_T1E = rope.sin.index_select(0, positions)
        self._host: HostStep = inputs.host
        self._cache = cache
        rows = torch.repeat_interleave(inputs.query_starts.diff().long())
        blocks = inputs.block_tables_RB[rows, positions // cache.block_size].long()
        offsets = positions % cache.block_size
        heads = torch.arange(cache.num_kv_heads)
        self.written_tokens: Tensor | None = None  # None: all
        if (inputs.host.first_position < inputs.host.num_cached).any():
            self.written_tokens = torch.nonzero(positions >= inputs.num_cached_R[rows]).view(-1)
            blocks, offsets = blocks[self.written_tokens], offsets[self.written_tokens]
        self.written = ((blocks[:, None] * cache.num_kv_heads + heads) * cache.block_size + offsets[:, None]).view(-1)
        self.opened = blocks[offsets == 0]
        self._passes: dict[int, tuple[Pass, ...]] = {}

    def passes(self, window: int) -> tuple[Pass, ...]:
        if window not in self._passes:
            cache = self._cache
            self._passes[window] = passes(
                self._host,
                block_size=cache.block_size,
                num_kv_heads=cache.num_kv_heads,
                null_block=cache.null_block,
                window=window,
            )
        return self._passes[window]


class CpuOps:
    def __init__(self, dtype: torch.dtype, numerics: Numerics) -> None:
        self.dtype = dtype
        self.acc = accumulator(dtype)
        self.numerics = numerics
        self._tied: tuple[Tensor | None, CpuWeight | None] = None, None  # an embedding that is the head too

    def prepare_column(self, weight_NK: Tensor, bias_N: Tensor | None) -> CpuWeight:
        return prepare(weight_NK, bias_N, self.numerics.matmul, consume=True)

    def prepare_head(self, weight_VD: Tensor, tied: bool) -> CpuWeight:
        chosen = self.numerics
        weight = prepare(weight_VD, None, (chosen.tied_head if tied else None) or chosen.matmul, consume=True)
        if tied:
            self._tied = weight_VD, weight
        return weight

    def prepare_row(self, weight_NK: Tensor, bias_N: Tensor | None, part: LeafPart) -> RowWeight:
        count, path = part.count if self.numerics.leaves else 1, self.numerics.matmul
        if path.library == "fma":
            return RowWeight((prepare(weight_NK, None, path, leaves=count, consume=True),), bias_N, part)
        leaves = weight_NK.chunk(count, 1)
        return RowWeight(tuple(prepare(leaf.contiguous(), None, path) for leaf in leaves), bias_N, part)

    def prepare_gated(self, weight_NK: Tensor) -> CpuWeight:
        path = self.numerics.matmul
        return prepare(weight_NK, None, path, gated=path.library == "fma", consume=True)

    def prepare_experts(self, gate_up_XNK: Tensor, down_XDI: Tensor, part: LeafPart) -> moe.Experts:
        return moe.Experts(
            tuple(self.prepare_gated(w.contiguous()) for w in gate_up_XNK),
            tuple(self.prepare_row(w, None, part).leaves for w in down_XDI),
            part if self.numerics.leaves else LeafPart(part.first, 1, part.total),
        )

    def prepare_router(self, weight_XD: Tensor) -> CpuWeight:
        return prepare(weight_XD.to(self.acc), None, probe(self.acc).matmul)

    def prepare_rope(self, cos_PE: Tensor, sin_PE: Tensor) -> RopeTables:
        return RopeTables(
            torch.cat((cos_PE, cos_PE), -1).unsqueeze(1).to(self.acc),
            torch.cat((-sin_PE, sin_PE), -1).unsqueeze(1).to(self.acc),
        )

    def begin(self, inputs: StepInputs, cache: KVCache, rope: RopeTables) -> CpuStep:
        return CpuStep(inputs, cache, rope)

    def embed(self, ids_T: Tensor, table_VD: Tensor, first_id: int) -> Tensor:
        if len(table_VD) == 0:
            return table_VD.new_zeros((len(ids_T), table_VD.shape[1]))
        local = ids_T - first_id
        inside = (local >= 0) & (local < len(table_VD))
        local = local.clamp(0, len(table_VD) - 1)
        tied, head = self._tied
        rows = table_rows(head, local) if tied is table_VD and head is not None else table_VD[local]
        return rows.masked_fill_(~inside.unsqueeze(1), 0)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return rms_norm(x_TD, weight_D, eps)

    def add_rms_norm(self, update: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual = residual_TD + update
        return rms_norm(residual, weight_D, eps), residual

    def add_norm_route(
        self, update: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, router: Router
    ) -> tuple[Tensor, Tensor]:
        return self.add_rms_norm(update, residual_TD, weight_D, eps)

    def linear(self, x_TK: Tensor, weight: CpuWeight) -> Tensor:
        return matmul(x_TK, weight)

    def gated_linear(self, x_TK: Tensor, weight: CpuWeight) -> Tensor:
        return gated_matmul(x_TK, weight) if weight.packed is not None else silu_mul(matmul(x_TK, weight), self.acc)

    def row_linear(self, x_TK: Tensor, weight: RowWeight, group: Group) -> Tensor:
        return self._total(x_TK, weight, group).to(self.dtype)

    def _total(self, x_TK: Tensor, weight: RowWeight, group: Group) -> Tensor:
        """The sum over all ranks in the accumulator's type, in the model's order or (`fast`) the library's."""
        sums = self._leaf_sums(x_TK, weight)
        total = fold_across(sums, weight.part, group) if self.numerics.leaves else group.all_reduce(sums[0])
        return total if weight.bias_N is None else total + weight.bias_N

    def _leaf_sums(self, x_TK: Tensor, weight: RowWeight) -> list[Tensor]:
        return leaf_matmuls(x_TK, weight.leaves, self.acc)

    def full_norms(self, qkv_TN: Tensor, norm: QKNorm, shape: HeadShape, part: LeafPart, group: Group) -> Tensor:
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        q, k, v = torch.split(qkv_TN, [q_size, kv_size, kv_size], 1)
        q = self.full_norm(q, norm.query, norm.eps, part, group)
        k = self.full_norm(k, norm.key, norm.eps, part, group)
        return torch.cat((q, k, v), 1)

    def full_norm(self, x_TN: Tensor, weight_N: Tensor, eps: float, part: LeafPart, group: Group) -> Tensor:
        x = x_TN.to(self.acc)
        leaves = x.reshape(len(x), part.count, -1).square().sum(-1)
        squares = [leaf.unsqueeze(1) for leaf in leaves.unbind(1)]
        mean = fold_across(squares, part, group) / (x.shape[1] // part.count * part.total)
        normed: Tensor = x * torch.rsqrt(mean + eps) * weight_N
        return normed.to(x_TN.dtype)

    def qkv_rope_write(
        self,
        qkv_TN: Tensor,
        norm: QKNorm | None,
        clip: float | None,
        shape: HeadShape,
        cache: LayerCache,
        step: CpuStep,
    ) -> Tensor:
        if clip is not None:
            qkv_TN = qkv_TN.clamp(-clip, clip)
        qkv = qkv_TN.view(len(qkv_TN), -1, shape.head_dim)
        turning, values = torch.split(qkv, [shape.num_heads + shape.num_kv_heads, shape.num_kv_heads], 1)
        if norm is not None:
            queries, keys = torch.split(turning, [shape.num_heads, shape.num_kv_heads], 1)
            turning = torch.cat((rms_norm(queries, norm.query, norm.eps), rms_norm(keys, norm.key, norm.eps)), 1)
        turning = turning.to(self.acc)
        swapped = torch.roll(turning, shape.head_dim // 2, -1)
        turned = (turning * step.cos_T1E).add_(swapped.mul_(step.sin_T1E))
        keys = turned[:, shape.num_heads :]
        for stored, new in ((cache.keys, keys), (cache.values, values)):
            if step.written_tokens is not None:
                new = new[step.written_tokens]
            if len(step.opened):
                stored.index_fill_(0, step.opened, 0)
            flat = stored.view(-1, shape.head_dim)
            flat.index_copy_(0, step.written, new.reshape(-1, shape.head_dim).to(stored.dtype))
        return turned[:, : shape.num_heads] * shape.scale

    def attention(self, queries: Tensor, shape: HeadShape, cache: LayerCache, step: CpuStep) -> Tensor:
        out = torch.empty(queries.shape, dtype=self.dtype)
        for work in step.passes(shape.window):
            attend(
                queries,
                cache,
                work,
                out,
                num_kv_heads=shape.num_kv_heads,
                row_multiple=self.numerics.attention_rows,
            )
        return out.view(len(out), -1)

    def moe(self, x_TD: Tensor, router: Router, experts: moe.Experts, group: Group) -> Tensor:
        logits = matmul(x_TD.to(self.acc), router.weight)
        ids, weights = moe.choose(logits, router.experts_per_token, router.renormalise)
        leaves = moe.leaf_sums(x_TD, ids, weights, experts, self.acc)
        total = fold_across(leaves, experts.part, group) if self.numerics.leaves else group.all_reduce(leaves[0])
        return total.to(self.dtype)

    def logits(self, x_RD: Tensor, weight: CpuWeight) -> Tensor:
        return wide_matmul(x_RD, weight) if weight.packed is not None else matmul(x_RD, weight).to(self.acc)
