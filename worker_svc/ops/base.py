"""`Ops`: the arithmetic that a model is written in, cut where kernels fuse.

Knows which values a layer hands over. Does not know families, files or the batch's meaning beyond `StepInputs`.
Invariant (numerics `invariant`): a row of a result depends on that row's inputs and the weights alone; every reduction
is a fixed expression over global positions, so neither other rows, nor chunking, nor threads, nor tp change a bit.

Weights are prepared once at load: an implementation owns their layout (`prepare_*`) and gets its own form back in the
calls. What `row_linear` and `moe` return is handed to `add_rms_norm` and nowhere else, so it may be a pending sum.

Legend: T tokens of the step, R rows, D hidden size, H query heads, K kv heads, E head size (local to the rank).
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from worker_svc.kv_cache import KVCache, LayerCache
from worker_svc.ops.leaves import LeafPart
from worker_svc.parallel.group import Group
from worker_svc.step_inputs import StepInputs

# What only the implementation that made it looks into.
Weight = Any  # a prepared matmul weight
Update = Any  # a sum to be added to the residual
Step = Any  # one step's facts in the form the implementation likes


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Attention as one rank sees it. `window` 0: all earlier keys."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int = 0

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)


@dataclass(frozen=True, slots=True)
class QKNorm:
    """Norms of queries and keys: [E] each, of a head, or as wide as this rank's heads."""

    query: Tensor
    key: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Router:
    weight: Weight  # [experts, D], fp32
    experts_per_token: int
    renormalise: bool


class Ops(Protocol):
    dtype: torch.dtype  # of weights and activations

    def prepare_column(self, weight_NK: Tensor, bias_N: Tensor | None) -> Weight:
        """K in order, one accumulator."""
        ...

    def prepare_head(self, weight_VD: Tensor, tied: bool) -> Weight:
        """Like a column weight; a tied one is the embedding too and is not held twice."""
        ...

    def prepare_row(self, weight_NK: Tensor, bias_N: Tensor | None, part: LeafPart) -> Weight:
        """`weight_NK` holds this rank's columns: the leaves of `part`."""
        ...

    def prepare_gated(self, weight_NK: Tensor) -> Weight:
        """Gate rows, then as many up rows."""
        ...

    def prepare_experts(self, gate_up_XNK: Tensor, down_XDI: Tensor, part: LeafPart) -> Weight:
        """X experts, each gate rows then up rows; `down` holds this rank's columns of each."""
        ...

    def prepare_router(self, weight_XD: Tensor) -> Weight:
        """Kept and computed in fp32 (fp64 for fp64 models)."""
        ...

    def prepare_rope(self, cos_PE: Tensor, sin_PE: Tensor) -> Weight:
        """Tables [positions, head_dim // 2] in fp32."""
        ...

    def begin(self, inputs: StepInputs, cache: KVCache, rope: Weight) -> Step:
        """What all layers of this step share."""
        ...

    def embed(self, ids_T: Tensor, table_VD: Tensor, first_id: int) -> Tensor:
        """Rows of the local table; zeros for ids outside it."""
        ...

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, update: Update, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Any, Tensor]:
        """(norm(update + residual) in whatever form `linear` and `gated_linear` like, update + residual)."""
        ...

    def add_norm_route(
        self, update: Update, residual_TD: Tensor, weight_D: Tensor, eps: float, router: Router
    ) -> tuple[Any, Tensor]:
        """`add_rms_norm` where `moe` with this router is what reads the norm: in whatever form `moe` likes."""
        ...

    def linear(self, x_TK: Tensor, weight: Weight) -> Tensor: ...

    def gated_linear(self, x_TK: Tensor, weight: Weight) -> Tensor:
        """silu(x gate^T) * (x up^T)."""
        ...

    def row_linear(self, x_TK: Tensor, weight: Weight, group: Group) -> Update:
        """This rank's leaves, exchanged and folded in the model's fixed order, rounded once."""
        ...

    def full_norms(self, qkv_TN: Tensor, norm: QKNorm, shape: HeadShape, part: LeafPart, group: Group) -> Any:
        """RMS norms of queries and keys over widths that ranks share: squares summed over leaves in the fixed order.

        What `qkv_rope_write` takes in place of the product, which may norm them there.
        """
        ...

    def qkv_rope_write(
        self, qkv_TN: Any, norm: QKNorm | None, clip: float | None, shape: HeadShape, cache: LayerCache, step: Step
    ) -> Any:
        """Clip, norm by head, rotate, write keys and values to the cache; the queries for `attention`."""
        ...

    def attention(self, queries: Any, shape: HeadShape, cache: LayerCache, step: Step) -> Tensor:
        """[T, H * E]: softmax(q k^T * scale) v over each token's own and earlier keys."""
        ...

    def moe(self, x_TD: Any, router: Router, experts: Weight, group: Group) -> Update:
        """Router in fp32, ties to the lower expert id, experts summed in slot order in fp32. x: of `add_norm_route`."""
        ...

    def logits(self, x_RD: Tensor, weight: Weight) -> Tensor:
        """The head over the local vocabulary, in fp32 (fp64 for fp64 models)."""
        ...
