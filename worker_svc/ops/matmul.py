"""Matrix products on CPU: how rows and weights reach our own product or a library's, so that a row's bits do not
depend on its neighbours.

Knows the paths that `invariance.py` chooses among and how a weight is laid out for each. Does not know layers or ranks.
Invariant (any path that passed the probe): row i of `matmul(x, w)` depends on row i of x, on w and on nothing else.

    fma      `product.py`: one expression on every processor; nothing below applies to it
    packed   oneDNN, weight reordered once at load          onednn   oneDNN, weight as it is
    blas     torch's own product (MKL where torch has it; for bfloat16 that is oneDNN again)

Rows are padded with zeros to a multiple of `row_multiple`; with `row_tile` the library only ever sees that many.
Fewer outputs than MINIMUM_OUTPUTS are padded at load: a product with one column takes another way than a matrix.
"""

import importlib.util
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from worker_svc.ops.product import PackedWeight

MINIMUM_OUTPUTS = 16
Library = Literal["fma", "packed", "onednn", "blas"]


@dataclass(frozen=True, slots=True)
class MatmulPath:
    library: Library
    row_multiple: int = 1
    row_tile: int = 0

    def __str__(self) -> str:
        if self.library == "fma":
            return self.library
        rows = f"tile{self.row_tile}" if self.row_tile else f"rows{self.row_multiple}"
        return f"{self.library}-{rows}"


@dataclass(frozen=True, eq=False, slots=True)
class CpuWeight:
    """A weight [N, K] laid out for `path`; `packed` where that is our own product."""

    data: Tensor
    bias_N: Tensor | None
    path: MatmulPath
    num_outputs: int
    packed: "PackedWeight | None" = None


@cache
def own_product() -> ModuleType | None:
    """`product.py`, or nothing where numba is absent or cannot make its code here."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        from worker_svc.ops import product
    except (ImportError, RuntimeError, OSError):
        return None
    return product


def onednn_available(dtype: torch.dtype) -> bool:
    """Whether torch's oneDNN entry points exist and take this type here: bfloat16 needs AVX-512 or better."""
    ops = torch.ops.mkldnn
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not (hasattr(ops, "_linear_pointwise") and hasattr(ops, "_reorder_linear_weight")):
        return False
    one = torch.ones(MINIMUM_OUTPUTS, MINIMUM_OUTPUTS, dtype=dtype)
    try:
        for path in (MatmulPath("packed"), MatmulPath("onednn")):
            matmul(one, prepare(one, None, path))
    except RuntimeError:
        return False
    return True


def prepare(
    weight_NK: Tensor,
    bias_N: Tensor | None,
    path: MatmulPath,
    *,
    leaves: int = 1,
    gated: bool = False,
    consume: bool = False,
) -> CpuWeight:
    """leaves, gated: for our own product only. consume: the given weight is not needed any more."""
    if path.library == "fma":
        from worker_svc.ops.product import pack

        packed = pack(weight_NK.contiguous(), bias_N, leaves=leaves, gated=gated, consume=consume)
        return CpuWeight(packed.panels, bias_N, path, packed.num_outputs, packed)
    assert leaves == 1 and not gated
    data = weight_NK
    if 0 < len(weight_NK) < MINIMUM_OUTPUTS:
        spare = MINIMUM_OUTPUTS - len(weight_NK)
        data = F.pad(weight_NK, (0, 0, 0, spare))
        bias_N = bias_N if bias_N is None else F.pad(bias_N, (0, spare))
    if path.library == "packed" and weight_NK.numel():
        data = torch.ops.mkldnn._reorder_linear_weight(data)
    return CpuWeight(data, bias_N, path, weight_NK.shape[0])


def matmul(x_MK: Tensor, weight: CpuWeight) -> Tensor:
    """x w^T + bias, [M, N]."""
    if weight.packed is not None:
        from worker_svc.ops.product import product

        return product(x_MK, weight.packed)
    path, rows = weight.path, x_MK.shape[0]
    if not rows or not weight.num_outputs:
        return x_MK.new_empty((rows, weight.num_outputs))
    if path.row_tile:
        y_MN = _tiled(x_MK, weight, path.row_tile)
    elif spare := -rows % path.row_multiple:
        y_MN = _product(F.pad(x_MK, (0, 0, 0, spare)), weight)[:rows]
    else:
        y_MN = _product(x_MK, weight)
    return y_MN if y_MN.shape[1] == weight.num_outputs else y_MN[:, : weight.num_outputs].contiguous()


def wide_matmul(x_MK: Tensor, weight: CpuWeight) -> Tensor:
    """x w^T + bias in fp32, not rounded to the type of x. Our own product only."""
    from worker_svc.ops.product import product

    assert weight.packed is not None
    return product(x_MK, weight.packed, torch.float32)


def gated_matmul(x_MK: Tensor, weight: CpuWeight) -> Tensor:
    """silu(x gate^T) * (x up^T), rounded once. Our own product only."""
    from worker_svc.ops.product import gated_product

    assert weight.packed is not None
    return gated_product(x_MK, weight.packed)


def leaf_matmuls(x_MK: Tensor, leaves: tuple[CpuWeight, ...], acc: torch.dtype) -> list[Tensor]:
    """Each leaf's sum [M, N] in the accumulator's type."""
    if leaves[0].packed is not None:
        from worker_svc.ops.product import leaf_sums

        return list(leaf_sums(x_MK, leaves[0].packed).unbind(0))
    parts = x_MK.chunk(len(leaves), 1)
    return [matmul(part.contiguous(), leaf).to(acc) for part, leaf in zip(parts, leaves, strict=True)]


def table_rows(weight: CpuWeight, ids_T: Tensor) -> Tensor:
    """Rows of the weight as it was given, [T, K]."""
    if weight.packed is None:
        return weight.data[ids_T]
    from worker_svc.ops.product import rows_of

    return rows_of(weight.packed, ids_T)


def _tiled(x_MK: Tensor, weight: CpuWeight, tile: int) -> Tensor:
    rows = x_MK.shape[0]
    padded = F.pad(x_MK, (0, 0, 0, -rows % tile)) if rows % tile else x_MK
    if padded.shape[0] == tile:
        return _product(padded, weight)[:rows]
    return torch.cat([_product(part, weight) for part in torch.split(padded, tile)])[:rows]


def _product(x_MK: Tensor, weight: CpuWeight) -> Tensor:
    if weight.path.library == "blas":
        return F.linear(x_MK, weight.data, weight.bias_N)
    return torch.ops.mkldnn._linear_pointwise(x_MK, weight.data, weight.bias_N, "none", [], "")  # type: ignore[no-any-return]
