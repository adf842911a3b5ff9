"""Launches of `decode_hopper_kernel.py`, and where it can be used: everywhere else `attention.decode` has a Triton
kernel with the same bits.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from worker_svc.cuda import hopper
from worker_svc.cuda.hopper import CACHE_TILE, processors

if TYPE_CHECKING:
    from worker_svc.cuda.attention import Rows, Shape, Tuning, Work

SPLIT_TILES = 4  # the least that a ring has room for
HEADS = 16  # of a kv head, at most
REGISTERS = 65536  # of a multiprocessor
THREADS = 256  # of a program: four warps compute, the producer's four count in full
FRESH_HEADS = 6  # of a kv head, at most, whose queries are rotated along with its key and its value


@dataclass(frozen=True, slots=True)
class Unrotated:
    """New tokens' rows of the qkv product, whose norms, rotation and writing to the cache are left to attention."""

    qkv: torch.Tensor  # [T, (H + K + K) * D]
    q_weight: torch.Tensor | None  # [D]; None: no norm
    k_weight: torch.Tensor | None
    epsilon: float
    clip: float | None
    cosines: torch.Tensor  # [positions, D / 2] fp32
    sines: torch.Tensor

    def __len__(self) -> int:
        return len(self.qkv)


def _kernel() -> Any:
    return hopper.kernel("decode_hopper_kernel", "hopper_decode_kernel")


def fits(shape: "Shape") -> bool:
    """Whether the kernel is there and can read a cache of this shape."""
    return hopper.reads(shape, HEADS) and _kernel() is not None


def can_rotate(shape: "Shape", dtype: torch.dtype) -> bool:
    """Whether `decode` takes rows `Unrotated`."""
    return dtype.itemsize == 2 and shape.heads // shape.kv_heads <= FRESH_HEADS and fits(shape)


def decode(
    shape: "Shape", q: torch.Tensor | Unrotated, k: torch.Tensor, v: torch.Tensor, rows: "Rows", work: "Work",
    scale: float, split: int, tuning: "Tuning", *, dependent: bool, early: bool,
) -> None:  # fmt: skip
    """The splits' partial results; arguments as for `attention.decode`, 16-bit types."""
    width, group = shape.head_dim, shape.heads // shape.kv_heads
    heads = 8 if group <= 8 else 16
    fresh = q if isinstance(q, Unrotated) else None
    values = fresh.qkv if fresh is not None else q
    assert isinstance(values, torch.Tensor)
    height = min(CACHE_TILE, shape.block_size)
    each = tuning.hopper_decode_programs
    stages = max(SPLIT_TILES, tuning.hopper_decode_stages - heads // 16)  # wide queries take the room of a tile
    _kernel()[(each * processors(values.device.index),)](
        hopper.rows_in_boxes(values, width, heads), hopper.rows_in_boxes(k, width, height),
        hopper.rows_in_boxes(v, width, height), rows.tables, rows.tables.stride(0), rows.row_slots,
        rows.query_starts, rows.decode_lengths, work.work_row, work.work_split, work.work_item, work.count,
        work.acc, work.sums, work.m, scale, values,
        *((fresh.q_weight, fresh.k_weight) if fresh and fresh.q_weight is not None else (values, values)),
        *((fresh.cosines, fresh.sines) if fresh else (work.acc, work.acc)), k, v,
        fresh.epsilon if fresh else 0.0, (fresh.clip if fresh else None) or 0.0,
        KV_HEADS=shape.kv_heads, G=group, HEADS=heads, D=width, PAGE=shape.block_size, WINDOW=shape.window,
        SPLIT=split, STAGES=stages * 128 // width, FRESH=fresh is not None,
        CLIP=fresh is not None and fresh.clip is not None, NORM=fresh is not None and fresh.q_weight is not None,
        DEPENDENT=dependent, EARLY=dependent and early, num_warps=4,
        maxnreg=min(128, REGISTERS // (each * THREADS) // 8 * 8), **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
