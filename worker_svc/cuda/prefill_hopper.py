"""Launches of `prefill_hopper_kernel.py`, and where it can be used: everywhere else `attention.prefill` has a Triton
kernel with the same bits.

Gluon is experimental and has no interpreter, so it is imported where it is used.
"""

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from worker_svc.cuda.attention import Rows, Shape, Tuning

ROWS = 128  # of a tile: tokens times heads of one kv head
TILE = 64


@functools.cache
def _kernel() -> Any:
    """The kernel, or None where this device or this Triton has none."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    try:
        from worker_svc.cuda.prefill_hopper_kernel import hopper_prefill_kernel
    except ImportError:
        return None
    return hopper_prefill_kernel


def fits(shape: "Shape") -> bool:
    """Whether a cache of this shape can be read: blocks that tiles are made of, heads that a tile has room for."""
    group = shape.heads // shape.kv_heads
    boxed = shape.block_size % TILE == 0 or shape.block_size in (16, 32)
    return shape.head_dim in (64, 128) and boxed and group <= TILE and _kernel() is not None


def prefill(
    shape: "Shape", q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: "Rows", out: torch.Tensor, max_tiles: int,
    scale: float, split: int, tuning: "Tuning", *, dependent: bool,
) -> None:  # fmt: skip
    """Arguments as for `attention.prefill`; 16-bit types, tiles of ROWS."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    width, height = shape.head_dim, min(TILE, shape.block_size)
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_desc, v_desc = (
        TensorDescriptor(cache, [cache.numel() // width, width], [width, 1], [height, width], layout)
        for cache in (k, v)
    )
    _kernel()[(shape.kv_heads, max_tiles)](
        q, k_desc, v_desc, rows.tables, rows.tables.stride(0), rows.row_slots, rows.query_starts, rows.first_positions,
        rows.tile_rows, rows.tile_tokens, rows.num_tiles, out, scale,
        KV_HEADS=shape.kv_heads, G=shape.heads // shape.kv_heads, D=width, PAGE=shape.block_size, WINDOW=shape.window,
        SPLIT=split, STAGES=tuning.hopper_stages, DEPENDENT=dependent, num_warps=4,
        **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
