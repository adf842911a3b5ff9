"""Launches of `prefill_hopper_kernel.py`, and where it can be used: everywhere else `attention.prefill` has a Triton
kernel with the same bits.
"""

from typing import TYPE_CHECKING, Any

import torch

from worker_svc.cuda import hopper
from worker_svc.cuda.hopper import CACHE_TILE

if TYPE_CHECKING:
    from worker_svc.cuda.attention import Rows, Shape, Tuning

ROWS = 128  # of a tile: tokens times heads of one kv head


def _kernel() -> Any:
    return hopper.kernel("prefill_hopper_kernel", "hopper_prefill_kernel")


def fits(shape: "Shape") -> bool:
    """Whether the kernel is there and can read a cache of this shape."""
    return hopper.reads(shape, CACHE_TILE) and _kernel() is not None


def prefill(
    shape: "Shape", q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: "Rows", out: torch.Tensor, max_tiles: int,
    scale: float, split: int, tuning: "Tuning", *, dependent: bool,
) -> None:  # fmt: skip
    """Arguments as for `attention.prefill`; 16-bit types, tiles of ROWS."""
    width, height = shape.head_dim, min(CACHE_TILE, shape.block_size)
    k_desc, v_desc = (hopper.rows_in_boxes(cache, width, height) for cache in (k, v))
    _kernel()[(shape.kv_heads, max_tiles)](
        q, k_desc, v_desc, rows.tables, rows.tables.stride(0), rows.row_slots, rows.query_starts, rows.first_positions,
        rows.tile_rows, rows.tile_tokens, rows.num_tiles, out, scale,
        KV_HEADS=shape.kv_heads, G=shape.heads // shape.kv_heads, D=width, PAGE=shape.block_size, WINDOW=shape.window,
        SPLIT=split, STAGES=tuning.hopper_stages, DEPENDENT=dependent, num_warps=4,
        **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
