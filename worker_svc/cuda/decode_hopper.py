"""Launches of `decode_hopper_kernel.py`, and where it can be used: everywhere else `attention.decode` has a Triton
kernel with the same bits.

Gluon is experimental and has no interpreter, so it is imported where it is used.
"""

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from worker_svc.cuda.attention import Rows, Shape, Tuning, Work

TILE = 64
SPLIT_TILES = 4  # the least that a ring has room for
HEADS = 16  # of a kv head, at most
REGISTERS = 65536  # of a multiprocessor
THREADS = 256  # of a program: four warps compute, the producer's four count in full


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


def decode(
    shape: "Shape", q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: "Rows", work: "Work", scale: float,
    split: int, tuning: "Tuning", *, dependent: bool,
) -> None:  # fmt: skip
    """The splits' partial results; arguments as for `attention.decode`, 16-bit types."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    width, group = shape.head_dim, shape.heads // shape.kv_heads
    heads = 8 if group <= 8 else 16
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    def boxes(tensor: torch.Tensor, height: int) -> TensorDescriptor:
        return TensorDescriptor(tensor, [tensor.numel() // width, width], [width, 1], [height, width], layout)

    height = min(TILE, shape.block_size)
    each = tuning.hopper_decode_programs
    stages = max(SPLIT_TILES, tuning.hopper_decode_stages - heads // 16)  # wide queries take the room of a tile
    _kernel()[(each * _multiprocessors(q.device.index),)](
        boxes(q, heads), boxes(k, height), boxes(v, height), rows.tables, rows.tables.stride(0), rows.row_slots,
        rows.query_starts, rows.decode_lengths, work.work_row, work.work_split, work.work_item, work.count,
        work.acc, work.sums, work.m, scale,
        KV_HEADS=shape.kv_heads, G=group, HEADS=heads, D=width, PAGE=shape.block_size, WINDOW=shape.window,
        SPLIT=split, STAGES=stages * 128 // width, DEPENDENT=dependent, num_warps=4,
        maxnreg=min(128, REGISTERS // (each * THREADS) // 8 * 8), **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
