"""Row-parallel products in leaves: the same bits on any number of ranks that divides them.

Knows which kernel serves how many rows, and that few rows leave their leaves apart for whoever folds them next: the
exchange between ranks, or a kernel of its own on one rank. Does not know layers. Plain twin: `ops/leaves.fold` over
one product a leaf (`plain`). Invariant: tiles and the number of rows change no bit.

Legend: M rows of the bucket, N outputs, K inputs of this rank, C its leaves.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from worker_svc.cuda import collective_kernels, leaf_kernels
from worker_svc.ops.leaves import fold

APART_ROWS = 256  # up to it leaves are programs of their own
LEAST_K = 16  # of a leaf: what one instruction multiplies
FOLD_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class LeafTile:
    block_m: int
    block_n: int
    block_k: int  # at most: it must divide a leaf
    stages: int
    warps: int
    group_m: int = 8


def rule(rows: int) -> LeafTile:
    if rows <= 16:
        return LeafTile(16, 64, 128, 4, 4)
    if rows <= APART_ROWS:
        return LeafTile(64, 64, 128, 3, 4)
    return LeafTile(128, 128, 64, 4, 8)


def can_cut(k: int, leaves: int) -> bool:
    """Whether a product over k columns of a rank can be cut into its leaves here."""
    return k % leaves == 0 and k // leaves % LEAST_K == 0


def apart(
    x_MK: Tensor, w_NK: Tensor, leaves: int, rows: Tensor, tile: LeafTile | None = None, *, dependent: bool = False
) -> Tensor:
    """Each leaf's sum, [C, M, N] fp32; rows past the count hold anything."""
    m, (n, k) = len(x_MK), w_NK.shape
    tile = tile or rule(m)
    out = torch.empty(leaves, m, n, dtype=torch.float32, device=x_MK.device)
    x_desc, w_desc, block_k = _operands(x_MK, w_NK, leaves, tile)
    grid = (triton.cdiv(m, tile.block_m), triton.cdiv(n, tile.block_n), leaves)
    leaf_kernels.leaves_apart_kernel[grid](
        x_desc, w_desc, out, rows, n, k // leaves, m * n,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=block_k, DEPENDENT=dependent, **_options(tile, dependent),
    )  # fmt: skip
    return out


def folded(
    x_MK: Tensor, w_NK: Tensor, leaves: int, rows: Tensor, dtype: torch.dtype, bias: Tensor | None = None,
    tile: LeafTile | None = None, *, dependent: bool = False,
) -> Tensor:  # fmt: skip
    """The fold of this rank's leaves (+ bias), [M, N], rounded once to `dtype`."""
    m, (n, k) = len(x_MK), w_NK.shape
    if m <= APART_ROWS and tile is None:
        return fold_rows(apart(x_MK, w_NK, leaves, rows, dependent=dependent), dtype, bias, dependent=dependent)
    tile = tile or rule(m)
    out = torch.empty(m, n, dtype=dtype, device=x_MK.device)
    x_desc, w_desc, block_k = _operands(x_MK, w_NK, leaves, tile)
    tiles_n = triton.cdiv(n, tile.block_n)
    leaf_kernels.leaves_folded_kernel[(triton.cdiv(m, tile.block_m) * tiles_n,)](
        x_desc, w_desc, out, out if bias is None else bias, rows, n, k // leaves, tiles_n, LEAVES=leaves,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=block_k, GROUP_M=tile.group_m, BIASED=bias is not None,
        DEPENDENT=dependent, **_options(tile, dependent),
    )  # fmt: skip
    return out


def fold_rows(sums: Tensor, dtype: torch.dtype, bias: Tensor | None = None, *, dependent: bool = False) -> Tensor:
    """[C, M, N] fp32 -> [M, N], in the tree's order, rounded once."""
    leaves, m, n = sums.shape
    out = torch.empty(m, n, dtype=dtype, device=sums.device)
    collective_kernels.fold_kernel[(triton.cdiv(m * n, FOLD_BLOCK),)](
        sums, out, out if bias is None else bias, m * n, m * n, n, LEAVES=leaves, BIASED=bias is not None,
        BLOCK=FOLD_BLOCK, DEPENDENT=dependent, **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
    return out


def plain(x_MK: Tensor, w_NK: Tensor, leaves: int, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """The twin: a product of fp32 a leaf, folded. Equal up to the order within a leaf."""
    total = fold([x.float() @ w.float().T for x, w in zip(x_MK.chunk(leaves, 1), w_NK.chunk(leaves, 1), strict=True)])
    return (total if bias is None else total + bias.float()).to(dtype)


def _operands(
    x_MK: Tensor, w_NK: Tensor, leaves: int, tile: LeafTile
) -> tuple[TensorDescriptor, TensorDescriptor, int]:
    """Descriptors, and the columns of one step: as many as divide a leaf."""
    (m, k), n = x_MK.shape, len(w_NK)
    assert can_cut(k, leaves), (k, leaves)
    leaf_k = k // leaves
    block_k = min(tile.block_k, leaf_k & -leaf_k)
    x_desc = TensorDescriptor(x_MK, [m, k], [x_MK.stride(0), 1], [tile.block_m, block_k])
    w_desc = TensorDescriptor(w_NK, [n, k], [w_NK.stride(0), 1], [tile.block_n, block_k])
    return x_desc, w_desc, block_k


def _options(tile: LeafTile, dependent: bool) -> dict[str, int | bool]:
    options: dict[str, int | bool] = {"num_warps": tile.warps, "num_stages": tile.stages}
    return options | {"launch_pdl": True} if dependent else options
