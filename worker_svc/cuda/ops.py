"""`Ops` on CUDA: each op one kernel of this package, launched on the current stream.

Knows which kernel an op is and which tile it gets. Does not know families, graphs or messages. Invariant (numerics
`invariant`): as in `ops/base.py`; `fast` hands products to cuBLAS, whose order of sums depends on the number of rows.

A step's columns and counts are read from the device (`StepState`), so that one captured pass serves every step of its
bucket; `begin` says which. The number of rows that an op touches is the step's number of tokens, except for `logits`,
where it is the number of sampling rows.

Legend: T tokens of the bucket, R sampling rows of the bucket.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from worker_svc.cuda import attention, leaf_product, matmul_hopper, moe, rows
from worker_svc.cuda.attention import Shape, Tuning, Work
from worker_svc.cuda.decode_hopper import Unrotated
from worker_svc.cuda.group import sum_across
from worker_svc.cuda.matmul import interleave_gate, linear
from worker_svc.cuda.matmul_hopper import Unnormed
from worker_svc.cuda.step_state import StepState
from worker_svc.cuda.tuning import tile_for
from worker_svc.kv_cache import KVCache, LayerCache
from worker_svc.ops.base import HeadShape, QKNorm, Router
from worker_svc.ops.leaves import LeafPart, fold
from worker_svc.parallel.group import Group

FEW_ROWS = 128  # decodes up to it are launched dependently
FULL_ROPE_WARPS = 8  # part of the expression of a norm over all heads
ROPE_GROUP, ROPE_WARPS = 8, 4  # heads a program; part of the expression of a q/k norm


@dataclass(frozen=True, slots=True)
class CudaWeight:
    """[N, K]; a gated one interleaved (`matmul.interleave_gate`). leaves: how K is summed, if not as a whole."""

    weight: Tensor
    bias: Tensor | None = None
    gated: bool = False
    leaves: LeafPart | None = None


@dataclass(frozen=True, slots=True)
class FullNormed:
    """A product whose queries and keys are still to be normed over their full width.

    squares: [T, 2] fp32, sums over all ranks' queries and keys; None: this rank has them all.
    """

    qkv: Tensor
    norm: QKNorm
    ranks: int
    squares: Tensor | None


@dataclass(frozen=True, slots=True)
class Rope:
    cos: Tensor  # [positions, E / 2] fp32
    sin: Tensor


@dataclass(frozen=True, slots=True)
class Extent:
    """What a forward pass asks the host about: how far positions may reach."""

    max_position: int


@dataclass(frozen=True, slots=True)
class CudaInputs:
    """What `StepInputs` is on CUDA: the bucket of a step whose facts are in `state`."""

    token_ids_T: Tensor
    host: Extent  # of a step as large as any that will run
    state: StepState
    work: Work
    max_rows: int
    max_tiles: int  # 0: every row has one new token
    shared: bool = False  # read splits that rows share once


@dataclass(frozen=True, slots=True)
class CudaStep:
    inputs: CudaInputs
    block_size: int
    rope: Rope


class CudaOps:
    """Args:
    numerics: `invariant`, or `fast` for cuBLAS products.
    dependent: launch the kernels of small decodes before the one before has ended. Large steps are slower so (measured:
        5 % at 256 rows of Qwen3-8B, 10 % in prefill).
    in_leaves: sum row-parallel products in the model's leaves, so that the number of ranks changes no bit.
    """

    def __init__(
        self, dtype: torch.dtype, numerics: str = "invariant", *, dependent: bool = True, in_leaves: bool = False
    ) -> None:
        self.dtype = dtype
        self.numerics = numerics
        self.in_leaves = in_leaves
        self.tuning = Tuning()
        self.dependent = self._may_depend = dependent
        self._num_tokens: Tensor | None = None
        self._num_samples: Tensor | None = None
        self._device_name = ""
        self._late: Tensor | None = None  # a product whose kernel let the next begin when all before it had ended
        self._early = False  # attention is the first or second kernel after such a product

    def prepare_column(self, weight_NK: Tensor, bias_N: Tensor | None) -> CudaWeight:
        return CudaWeight(weight_NK, bias_N)

    def prepare_head(self, weight_VD: Tensor, tied: bool) -> CudaWeight:
        return self.prepare_column(weight_VD, None)

    def prepare_row(self, weight_NK: Tensor, bias_N: Tensor | None, part: LeafPart) -> CudaWeight:
        return CudaWeight(weight_NK, bias_N, leaves=part if self.in_leaves else None)

    def prepare_gated(self, weight_NK: Tensor) -> CudaWeight:
        return CudaWeight(interleave_gate(weight_NK), gated=True)

    def prepare_experts(self, gate_up_XNK: Tensor, down_XDI: Tensor, part: LeafPart) -> moe.Experts:
        return moe.prepare(gate_up_XNK, down_XDI)

    def prepare_router(self, weight_XD: Tensor) -> Tensor:
        """In the activations' type: products of bf16 are exact in fp32, in which they are summed."""
        return weight_XD.contiguous()

    def prepare_rope(self, cos_PE: Tensor, sin_PE: Tensor) -> Rope:
        return Rope(cos_PE.contiguous(), sin_PE.contiguous())

    def begin(self, inputs: Any, cache: KVCache, rope: Rope) -> CudaStep:
        self.dependent = self._may_depend and not inputs.max_tiles and inputs.max_rows <= FEW_ROWS
        self._num_tokens = inputs.state.num_tokens
        self._num_samples = inputs.state.num_samples
        self._device_name = torch.cuda.get_device_name(inputs.token_ids_T.device)
        step = CudaStep(inputs, cache.block_size, rope)
        layer = cache.layers[0].keys
        shape = Shape(layer.shape[1], layer.shape[1], layer.shape[3], cache.block_size)
        attention.plan(
            shape, inputs.state, inputs.work, inputs.max_rows, shared=inputs.shared, dependent=self.dependent
        )
        return step

    @contextmanager
    def outside_a_step(self) -> Iterator[None]:
        """`logits` of all rows that it is given."""
        before, self._num_samples = self._num_samples, None
        try:
            yield
        finally:
            self._num_samples = before

    def embed(self, ids_T: Tensor, table_VD: Tensor, first_id: int) -> Tensor:
        out = torch.empty(len(ids_T), table_VD.shape[1], dtype=table_VD.dtype, device=table_VD.device)
        rows.embed_kernel[(len(ids_T),)](
            table_VD, ids_T, out, self._count(), table_VD.shape[1], first_id, len(table_VD),
            BLOCK=triton.next_power_of_2(table_VD.shape[1]), DEPENDENT=self.dependent, **self._options(rows.WARPS),
        )  # fmt: skip
        return out

    def settled(self, x_TD: Tensor | Unnormed) -> Tensor:
        """Norms that were left to a product, made after all."""
        if isinstance(x_TD, Unnormed):
            return self._norm(x_TD.update, x_TD.residual, x_TD.total, x_TD.weight, x_TD.epsilon)
        return x_TD

    def gather(self, x_TD: Tensor, index_R: Tensor, count: Tensor) -> Tensor:
        """x[index[i]] for i below the count."""
        out = torch.empty(len(index_R), x_TD.shape[1], dtype=x_TD.dtype, device=x_TD.device)
        rows.gather_rows_kernel[(len(index_R),)](
            x_TD, index_R, out, count, x_TD.shape[1],
            BLOCK=triton.next_power_of_2(x_TD.shape[1]), DEPENDENT=self.dependent, **self._options(rows.WARPS),
        )  # fmt: skip
        return out

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return self._norm(x_TD, None, None, weight_D, eps)

    def add_rms_norm(
        self, update: Tensor | moe.Answers, residual_TD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor | Unnormed, Tensor]:
        """The residual is changed in place, unless few rows leave the norm to the product that reads it."""
        if isinstance(update, moe.Answers):
            normed = moe.combine_norm(update, residual_TD, weight_D, eps, self._count(), dependent=self.dependent)
            return normed, residual_TD
        along = self.tuning.few_rows_along and self.numerics == "invariant"
        if along and matmul_hopper.can_norm(len(update), update.shape[1], update.dtype):
            total = torch.empty_like(residual_TD)
            return Unnormed(update, residual_TD, total, weight_D, eps), total
        return self._norm(update, residual_TD, residual_TD, weight_D, eps), residual_TD

    def add_norm_route(
        self, update: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, router: Router
    ) -> tuple[Tensor | moe.Normed, Tensor]:
        """Few rows get their logits along."""
        if len(update) > moe.NORM_ROWS:
            return self._norm(update, residual_TD, residual_TD, weight_D, eps), residual_TD
        return moe.norm_logits(
            update, residual_TD, weight_D, eps, router.weight, self._count(), dependent=self.dependent
        )

    def linear(self, x_TK: Tensor | Unnormed, weight: CudaWeight) -> Tensor:
        return self._product(x_TK, weight, self.dtype, self._count(), late=True)

    def gated_linear(self, x_TK: Tensor | Unnormed, weight: CudaWeight) -> Tensor:
        return self._product(x_TK, weight, self.dtype, self._count())

    def row_linear(self, x_TK: Tensor, weight: CudaWeight, group: Group) -> Tensor:
        if weight.leaves is not None:
            return self._row_leaves(x_TK, weight, weight.leaves, group)
        if group.tp == 1:
            return self._product(x_TK, weight, self.dtype, self._count())
        part = self._product(x_TK, CudaWeight(weight.weight), torch.float32, self._count())
        return sum_across(part[None], LeafPart(group.rank, 1, group.tp), group, self.dtype, weight.bias)

    def _row_leaves(self, x_TK: Tensor, weight: CudaWeight, part: LeafPart, group: Group) -> Tensor:
        count, matrix, dependent = self._count(), weight.weight, self.dependent
        if group.tp == 1:
            return leaf_product.folded(x_TK, matrix, part.count, count, self.dtype, weight.bias, dependent=dependent)
        if part.is_node and len(x_TK) > leaf_product.APART_ROWS:
            sums = leaf_product.folded(x_TK, matrix, part.count, count, torch.float32, dependent=dependent)[None]
        else:
            sums = leaf_product.apart(x_TK, matrix, part.count, count, dependent=dependent)
        return sum_across(sums, part, group, self.dtype, weight.bias)

    def full_norms(self, qkv_TN: Tensor, norm: QKNorm, shape: HeadShape, part: LeafPart, group: Group) -> FullNormed:
        """A head is a leaf of its own here, so that a rank's sum is a node of the tree."""
        if group.tp == 1:
            return FullNormed(qkv_TN, norm, 1, None)
        squares = torch.empty(len(qkv_TN), 2, dtype=torch.float32, device=qkv_TN.device)
        rows.full_squares_kernel[(len(qkv_TN),)](
            qkv_TN, squares, self._count(), HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads, D=shape.head_dim,
            **_heads_block(shape), DEPENDENT=self.dependent, **self._options(rows.WARPS),
        )  # fmt: skip
        return FullNormed(qkv_TN, norm, group.tp, fold(list(group.all_gather(squares).unbind(0))))

    def qkv_rope_write(
        self,
        qkv_TN: Tensor | FullNormed,
        norm: QKNorm | None,
        clip: float | None,
        shape: HeadShape,
        cache: LayerCache,
        step: CudaStep,
    ) -> Tensor | Unrotated:
        state = step.inputs.state
        self._early = (qkv_TN.qkv if isinstance(qkv_TN, FullNormed) else qkv_TN) is self._late
        if isinstance(qkv_TN, FullNormed):
            return self._full_rope_write(qkv_TN, clip, shape, cache, step)
        inputs, rope = step.inputs, step.rope
        whole = not inputs.max_tiles and not inputs.shared  # a step of decodes, each of which reads its own splits
        if whole and attention.rotates(self._form(shape, step), qkv_TN.dtype, inputs.max_rows, self.tuning):
            query, key, eps = (norm.query, norm.key, norm.eps) if norm is not None else (None, None, 0.0)
            return Unrotated(qkv_TN, query, key, eps, clip, rope.cos, rope.sin)
        queries = torch.empty(len(qkv_TN), shape.num_heads, shape.head_dim, dtype=qkv_TN.dtype, device=qkv_TN.device)
        heads = shape.num_heads + 2 * shape.num_kv_heads
        q_weight, k_weight, eps = (norm.query, norm.key, norm.eps) if norm is not None else (qkv_TN, qkv_TN, 0.0)
        rows.rope_write_kernel[(len(qkv_TN), triton.cdiv(heads, ROPE_GROUP))](
            qkv_TN, q_weight, k_weight, step.rope.cos, step.rope.sin, state.positions, state.token_slots, state.tables,
            state.tables.stride(0), queries, cache.keys, cache.values, self._count(), eps, clip or 0.0,
            CLIP=clip is not None, HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads, D=shape.head_dim,
            PAGE=step.block_size, NORM=norm is not None, GROUP=ROPE_GROUP, DEPENDENT=self.dependent,
            **self._options(ROPE_WARPS),
        )  # fmt: skip
        return queries

    def _full_rope_write(
        self, normed: FullNormed, clip: float | None, shape: HeadShape, cache: LayerCache, step: CudaStep
    ) -> Tensor:
        state, qkv, norm = step.inputs.state, normed.qkv, normed.norm
        queries = torch.empty(len(qkv), shape.num_heads, shape.head_dim, dtype=qkv.dtype, device=qkv.device)
        rows.full_rope_write_kernel[(len(qkv), 3)](
            qkv, qkv if normed.squares is None else normed.squares, norm.query, norm.key, step.rope.cos, step.rope.sin,
            state.positions, state.token_slots, state.tables, state.tables.stride(0), queries, cache.keys,
            cache.values, self._count(), norm.eps, clip or 0.0, normed.ranks * shape.num_heads * shape.head_dim,
            normed.ranks * shape.num_kv_heads * shape.head_dim, HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads,
            D=shape.head_dim, PAGE=step.block_size, CLIP=clip is not None, GIVEN=normed.squares is not None,
            **_heads_block(shape), DEPENDENT=self.dependent, **self._options(FULL_ROPE_WARPS),
        )  # fmt: skip
        return queries

    def attention(self, queries: Tensor | Unrotated, shape: HeadShape, cache: LayerCache, step: CudaStep) -> Tensor:
        inputs, form = step.inputs, self._form(shape, step)
        out = torch.empty(
            len(queries), shape.num_heads, shape.head_dim, dtype=self.dtype, device=cache.keys.device
        )  # fmt: skip
        if isinstance(queries, Unrotated):
            attention.decode(
                form, queries, cache.keys, cache.values, inputs.state, inputs.work, out, inputs.max_rows, self.tuning,
                dependent=self.dependent, early=self._early,
            )  # fmt: skip
            return out.view(len(out), -1)
        if inputs.shared:
            attention.decode_shared(
                form,
                queries,
                cache.keys,
                cache.values,
                inputs.state,
                inputs.work,
                self.tuning,
                dependent=self.dependent,
            )
        attention.decode(
            form, queries, cache.keys, cache.values, inputs.state, inputs.work, out, inputs.max_rows, self.tuning,
            dependent=self.dependent, early=self._early and not inputs.shared,
        )  # fmt: skip
        if inputs.max_tiles:
            attention.prefill(
                form, queries, cache.keys, cache.values, inputs.state, out, inputs.max_tiles, self.tuning,
                dependent=self.dependent,
            )  # fmt: skip
        return out.view(len(out), -1)

    def moe(self, x: Tensor | moe.Normed, router: Router, experts: moe.Experts, group: Group) -> Tensor | moe.Answers:
        slots, count, dependent = router.experts_per_token, self._count(), self.dependent
        if isinstance(x, moe.Normed):
            x_TD, parts = x.x_TD, x.parts
        else:
            x_TD, parts = x, moe.logits(x, router.weight, count, dependent=dependent)
        grouped = moe.worth_grouping(len(x_TD), slots, experts.number)
        if grouped:
            routed = moe.choose(
                parts, slots, experts.counts, count, renormalise=router.renormalise, grouped=True, dependent=dependent
            )
        else:
            routed = moe.left_to_experts(parts, slots, renormalise=router.renormalise)
        dtype = self.dtype if group.tp == 1 else torch.float32
        answers = moe.answer(
            x_TD, experts, routed, count, dtype, device_name=self._device_name, dependent=self.dependent
        )
        if group.tp == 1:
            return answers
        part = moe.combine(answers, count, torch.float32, dependent=self.dependent)
        return sum_across(part[None], LeafPart(group.rank, 1, group.tp), group, self.dtype)

    def logits(self, x_RD: Tensor, weight: CudaWeight) -> Tensor:
        if not len(weight.weight):  # a rank may hold no ids
            return torch.empty(len(x_RD), 0, dtype=torch.float32, device=weight.weight.device)
        count = self._num_samples
        if count is None:
            count = torch.tensor([len(x_RD)], dtype=torch.int32, device=x_RD.device)
        return self._product(x_RD, weight, torch.float32, count)

    def _form(self, shape: HeadShape, step: CudaStep) -> Shape:
        return Shape(shape.num_heads, shape.num_kv_heads, shape.head_dim, step.block_size, shape.window)

    def _count(self) -> Tensor:
        assert self._num_tokens is not None, "begin comes first"
        return self._num_tokens

    def _options(self, warps: int) -> dict[str, int | bool]:
        options: dict[str, int | bool] = {"num_warps": warps}
        return options | {"launch_pdl": True} if self.dependent else options

    def _norm(
        self, x_TD: Tensor, residual_TD: Tensor | None, total_TD: Tensor | None, weight_D: Tensor, eps: float
    ) -> Tensor:
        out = torch.empty_like(x_TD)
        rows.add_norm_kernel[(len(x_TD),)](
            x_TD, x_TD if residual_TD is None else residual_TD, x_TD if total_TD is None else total_TD, weight_D, out,
            self._count(), x_TD.shape[1], eps,
            ADD=residual_TD is not None, BLOCK=triton.next_power_of_2(x_TD.shape[1]),
            DEPENDENT=self.dependent, **self._options(rows.WARPS),
        )  # fmt: skip
        return out

    def _product(
        self, x_MK: Tensor | Unnormed, weight: CudaWeight, dtype: torch.dtype, count: Tensor, *, late: bool = False
    ) -> Tensor:
        n, k = weight.weight.shape
        width = n // 2 if weight.gated else n
        if self.numerics == "fast" and not weight.gated and dtype == self.dtype:
            return torch.nn.functional.linear(self.settled(x_MK), weight.weight, weight.bias)
        out = torch.empty(len(x_MK), width, dtype=dtype, device=weight.weight.device)
        tile = tile_for(self._device_name, n, k, len(x_MK), gated=weight.gated)
        if isinstance(x_MK, Unnormed):
            norming = matmul_hopper.norming(tile, k)
            if norming is None:
                x_MK = self.settled(x_MK)
            else:
                tile = norming
        was_late = linear(
            x_MK, weight.weight, out, count, tile,
            bias=weight.bias, gated=weight.gated, dependent=self.dependent, late=late,
        )  # fmt: skip
        self._late = out if was_late else None
        return out


def _heads_block(shape: HeadShape) -> dict[str, int]:
    """The tile that holds a token's heads, and the steps of a sum over them."""
    block = triton.next_power_of_2(max(shape.num_heads, shape.num_kv_heads))
    return {"BLOCK_H": block, "POWER": block.bit_length() - 1}
