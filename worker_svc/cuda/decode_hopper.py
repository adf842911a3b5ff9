"""Launches of `decode_hopper_kernel.py`, and where it can be used: everywhere else `attention.decode` has a Triton
kernel with the same bits.

Gluon is experimental and has no interpreter, so it is imported where it is used.
"""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from worker_svc.cuda.attention import Rows, Shape, Tuning, Work

TILE = 64
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


@functools.cache
def _kernel() -> Any:
    """The kernel, or None where this device or this Triton has none."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    try:
        from worker_svc.cuda.decode_hopper_kernel import hopper_decode_kernel
    except ImportError:
        return None
    return hopper_decode_kernel


def fits(shape: "Shape") -> bool:
    """Whether a cache of this shape can be read: blocks that tiles are made of, heads that a product has room for."""
    group = shape.heads // shape.kv_heads
    boxed = shape.block_size % TILE == 0 or shape.block_size in (16, 32)
    return shape.head_dim in (64, 128) and boxed and group <= HEADS and _kernel() is not None


def can_rotate(shape: "Shape", dtype: torch.dtype) -> bool:
    """Whether `decode` takes rows `Unrotated`."""
    return dtype.itemsize == 2 and shape.heads // shape.kv_heads <= FRESH_HEADS and fits(shape)


def decode(
    shape: "Shape", q: torch.Tensor | Unrotated, k: torch.Tensor, v: torch.Tensor, rows: "Rows", work: "Work",
    scale: float, split: int, tuning: "Tuning", *, dependent: bool, early: bool,
) -> None:  # fmt: skip
    """The splits' partial results; arguments as for `attention.decode`, 16-bit types."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    width, group = shape.head_dim, shape.heads // shape.kv_heads
    heads = 8 if group <= 8 else 16
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    def boxes(tensor: torch.Tensor, height: int) -> TensorDescriptor:
        return TensorDescriptor(tensor, [tensor.numel() // width, width], [width, 1], [height, width], layout)

    fresh = q if isinstance(q, Unrotated) else None
    values = fresh.qkv if fresh is not None else q
    assert isinstance(values, torch.Tensor)
    height = min(TILE, shape.block_size)
    each = tuning.hopper_decode_programs
    stages = max(SPLIT_TILES, tuning.hopper_decode_stages - heads // 16)  # wide queries take the room of a tile
    _kernel()[(each * _multiprocessors(values.device.index),)](
        boxes(values, heads), boxes(k, height), boxes(v, height), rows.tables, rows.tables.stride(0), rows.row_slots,
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


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
