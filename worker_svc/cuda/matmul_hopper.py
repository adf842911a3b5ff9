"""Launches of `matmul_hopper_kernel.py`, and where it can be used: everywhere else `matmul.py` has a Triton kernel with
the same bits.

Knows what a `Tile` of kind "hopper" means: block_m rows of x by block_n rows of w, a multiple of 8 (of 16 when gated)
and not only a power of two; warps that multiply, a producer's come on top; `programs` that stay on a processor
together. Gluon is experimental and has no interpreter, so it is imported where it is used.
"""

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from worker_svc.cuda.matmul import Tile

PANEL = 64  # columns of one swizzled row of shared memory
BARRIERS = 16  # bytes a stage
SLACK = 2048  # bytes that rings may lose to alignment, and what warp specialisation keeps
REGISTERS = 1 << 16  # of a multiprocessor


@functools.cache
def kernel() -> Any:
    """The kernel, or None where this device or this Triton has none."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    try:
        from worker_svc.cuda.matmul_hopper_kernel import hopper_kernel
    except ImportError:
        return None
    return hopper_kernel


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


def registers(tile: "Tile") -> int:
    """A thread at entry, and what the assembler keeps to: sums and 40 more, where so many programs leave that."""
    most = REGISTERS // (32 * (tile.warps + 4) * tile.programs)
    return min(max(64, -(-(sums(tile) + 40) // 8) * 8), most // 8 * 8, 248)


def fits(x: torch.Tensor, w: torch.Tensor, tile: "Tile", *, gated: bool) -> bool:
    """Whether the kernel is there and can read these operands."""
    sixteen = x.dtype == w.dtype and x.dtype in (torch.bfloat16, torch.float16)
    whole = tile.block_n % (16 if gated else 8) == 0 and tile.block_k % PANEL == 0
    rows = x.stride(0) % 8 == 0 and w.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and w.data_ptr() % 16 == 0
    return sixteen and whole and rows and kernel() is not None


def linear(
    x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, rows: torch.Tensor, tile: "Tile", processors: int, *,
    bias: torch.Tensor | None, gated: bool, dependent: bool,
) -> None:  # fmt: skip
    """Arguments as for `matmul.linear`; processors: multiprocessors of the device."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    height, k = x.shape
    n = w.shape[0]
    swizzled = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x_desc = TensorDescriptor(x, [height, k], [x.stride(0), 1], [tile.block_m, PANEL], swizzled)
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
        x_desc, w_desc, y_desc, out, w if bias is None else bias, rows, n, k, out.stride(0), column_tiles,
        HEIGHT=tile.block_m, CUT=tile.block_n, WINDOW=window(tile), BOX=box(tile), BLOCK_K=tile.block_k,
        STAGES=tile.stages, GROUP=tile.group_m, ONE=height <= tile.block_m, WARPS=tile.warps, GATED=gated,
        BIASED=bias is not None, BOXED=leaves_boxed, DEPENDENT=dependent, num_warps=tile.warps,
        maxnreg=registers(tile), **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
