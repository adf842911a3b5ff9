"""Launches of `matmul_hopper_kernel.py`, and where it can be used: everywhere else `matmul.py` has a Triton kernel with
the same bits.

Knows what a `Tile` of kind "hopper" means: block_m rows of x by block_n rows of w, a multiple of 8 (of 16 when gated)
and not only a power of two; warps that multiply, a producer's come on top; `programs` that stay on a processor
together. Gluon is experimental and has no interpreter, so it is imported where it is used.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from worker_svc.cuda import hopper

if TYPE_CHECKING:
    from worker_svc.cuda.matmul import Tile

PANEL = 64  # columns of one swizzled row of shared memory
BARRIERS = 16  # bytes a stage
SLACK = 2048  # bytes that rings may lose to alignment, and what warp specialisation keeps
REGISTERS = 1 << 16  # of a multiprocessor
SHARED_BYTES = 227 << 10  # of a program
NORMED_ROWS = (1, 2)  # how many rows a product norms for itself; with four it takes longer than two kernels
NORMED_COLUMNS = (1024, 2048, 4096)  # and how wide: eight rows are kept whole beside the ring


@dataclass(frozen=True, slots=True)
class Unnormed:
    """Rows whose norm is left to the product that reads them: norm(total), where total = update + residual is to be
    noted as well."""

    update: torch.Tensor  # [M, K]
    residual: torch.Tensor  # [M, K]
    total: torch.Tensor  # [M, K], neither of them
    weight: torch.Tensor  # [K]
    epsilon: float

    def __len__(self) -> int:
        return len(self.update)


def kernel() -> Any:
    """The kernel, or None where this device or this Triton has none."""
    return hopper.kernel("matmul_hopper_kernel", "hopper_kernel")


def window(tile: "Tile") -> int:
    """Rows of w that instructions read: what all warps together read at least, a power of two."""
    return int(max(16 * tile.warps, 1 << (tile.block_n - 1).bit_length()))


def box(tile: "Tile") -> int:
    """Rows of w that one copy brings."""
    return min(PANEL, tile.block_n & -tile.block_n)


def boxed(tile: "Tile", out: torch.Tensor | torch.dtype) -> bool:
    """Whether a tile leaves through shared memory: for many rows, where 16 bytes at a time would be slow."""
    dtype = out if isinstance(out, torch.dtype) else out.dtype
    aligned = isinstance(out, torch.dtype) or out.stride(0) * out.element_size() % 16 == 0
    return tile.block_m >= 128 and tile.block_n == window(tile) and dtype.itemsize == 2 and aligned


def shared_bytes(tile: "Tile", dtype: torch.dtype, *, gated: bool = False) -> int:
    """What a program needs, at most."""
    ring = tile.stages * ((tile.block_m + tile.block_n) * tile.block_k * 2 + BARRIERS)
    leaving = tile.block_m * tile.block_n // (2 if gated else 1) * 2 if boxed(tile, dtype) else 0
    return ring + (window(tile) - tile.block_n) * PANEL * 2 + leaving + SLACK


def sums(tile: "Tile") -> int:
    """Accumulators of a thread that multiplies."""
    return window(tile) * tile.block_m // (32 * tile.warps)


def registers(tile: "Tile", *, normed: bool = False) -> int:
    """A thread at entry, and what the assembler keeps to: sums and 40 more, where so many programs leave that, or what
    a norm needs before there are sums."""
    most = REGISTERS // (32 * (tile.warps + 4) * tile.programs)
    return min(max(168 if normed else 64, -(-(sums(tile) + 40) // 8) * 8), most // 8 * 8, 248)


def can_norm(rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Whether products of so many rows may find a tile by `norming`."""
    return rows in NORMED_ROWS and columns in NORMED_COLUMNS and dtype.itemsize == 2 and kernel() is not None


def norming(tile: "Tile", columns: int) -> "Tile | None":
    """The tile with a ring that leaves room for whole rows; None where nothing would be left of it."""
    if tile.kind != "hopper" or tile.block_m != 8 or tile.warps != 4 or columns % tile.block_k:
        return None
    stage = tile.block_n * tile.block_k * 2 + BARRIERS
    beside = 8 * columns * 2 + (window(tile) - tile.block_n) * PANEL * 2 + SLACK
    stages = min(tile.stages, (SHARED_BYTES - beside) // stage)
    return replace(tile, stages=stages, programs=1) if stages >= 2 else None


def fits(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, tile: "Tile", *, gated: bool) -> bool:
    """Whether the kernel is there, has room, and can read these operands."""
    sixteen = x.dtype == w.dtype and x.dtype in (torch.bfloat16, torch.float16)
    whole = tile.block_n % (16 if gated else 8) == 0 and tile.block_k % PANEL == 0
    rows = x.stride(0) % 8 == 0 and w.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and w.data_ptr() % 16 == 0
    room = shared_bytes(tile, out.dtype, gated=gated) <= SHARED_BYTES
    return sixteen and whole and rows and room and kernel() is not None


def linear(
    x: torch.Tensor | Unnormed, w: torch.Tensor, out: torch.Tensor, rows: torch.Tensor, tile: "Tile",
    processors: int, *, bias: torch.Tensor | None, gated: bool, dependent: bool, late: bool = False,
) -> None:  # fmt: skip
    """Arguments as for `matmul.linear`; processors: multiprocessors of the device. Rows to be normed take a tile of
    `norming`'s. late: the kernel after this one begins when those before it have ended."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    norm = x if isinstance(x, Unnormed) else None
    update = norm.update if norm is not None else x
    assert isinstance(update, torch.Tensor)
    height, k = update.shape
    n = w.shape[0]
    swizzled = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x_desc = TensorDescriptor(update, [height, k], [update.stride(0), 1], [tile.block_m, PANEL], swizzled)
    w_desc = TensorDescriptor(w, [n, k], [w.stride(0), 1], [box(tile), PANEL], swizzled)
    leaves_boxed = boxed(tile, out)
    y_desc = w_desc
    if leaves_boxed:
        y_box = [tile.block_m, tile.block_n // (2 if gated else 1)]
        swizzle = min(128, y_box[1] * 2)
        layout = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=16, rank=2)
        y_desc = TensorDescriptor(out, [height, out.shape[1]], [out.stride(0), 1], y_box, layout)
    column_tiles = -(-n // tile.block_n)
    tiles = column_tiles * -(-height // tile.block_m)
    kernel()[(min(tiles, processors * tile.programs),)](
        x_desc, w_desc, y_desc, out, w if bias is None else bias, rows,
        update, norm.residual if norm else update, norm.total if norm else update, norm.weight if norm else w,
        norm.epsilon if norm else 0.0, n, k, out.stride(0), column_tiles,
        HEIGHT=tile.block_m, CUT=tile.block_n, WINDOW=window(tile), BOX=box(tile), BLOCK_K=tile.block_k,
        STAGES=tile.stages, GROUP=tile.group_m, ONE=height <= tile.block_m, WARPS=tile.warps, GATED=gated,
        BIASED=bias is not None, BOXED=leaves_boxed, NORMED=k if norm else 0, LIVE=height if norm else 0,
        DEPENDENT=dependent, LATE=late, num_warps=tile.warps,
        maxnreg=registers(tile, normed=norm is not None), **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
