"""Matrix products on CPU: how rows and weights reach the library, so that a row's bits do not depend on its neighbours.

Knows the paths that `invariance.py` chooses among and how a weight is laid out for each. Does not know layers or ranks.
Invariant (any path that passed the probe): row i of `matmul(x, w)` depends on row i of x, on w and on nothing else.

    packed   oneDNN, weight reordered once at load          onednn   oneDNN, weight as it is
    blas     torch's own product (MKL where torch has it; for bfloat16 that is oneDNN again)

Rows are padded with zeros to a multiple of `row_multiple`; with `row_tile` the library only ever sees that many.
Fewer outputs than MINIMUM_OUTPUTS are padded at load: a product with one column takes another way than a matrix.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

MINIMUM_OUTPUTS = 16
Library = Literal["packed", "onednn", "blas"]


@dataclass(frozen=True, slots=True)
class MatmulPath:
    library: Library
    row_multiple: int = 1
    row_tile: int = 0

    def __str__(self) -> str:
        rows = f"tile{self.row_tile}" if self.row_tile else f"rows{self.row_multiple}"
        return f"{self.library}-{rows}"


@dataclass(frozen=True, eq=False, slots=True)
class CpuWeight:
    """A weight [N, K] laid out for `path`."""

    data: Tensor
    bias_N: Tensor | None
    path: MatmulPath
    num_outputs: int


@cache
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


def prepare(weight_NK: Tensor, bias_N: Tensor | None, path: MatmulPath) -> CpuWeight:
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
