"""What the kernels written for Hopper share: whether they are there, and how they see a layer's cache.

They are in Gluon, which is experimental and has no interpreter, so a kernel's module is imported where it is first
launched. Each has a Triton twin with the same bits, which serves everywhere else.
"""

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from worker_svc.cuda.attention import Shape

CACHE_TILE = 64  # keys or values that an instruction reads


@functools.cache
def kernel(module: str, name: str) -> Any:
    """A kernel of a module of this package, or None where this device or this Triton has none."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    try:
        return getattr(importlib.import_module(f"worker_svc.cuda.{module}"), name)
    except ImportError:
        return None


@functools.cache
def processors(device_index: int) -> int:
    """Streaming multiprocessors of a device."""
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)


def reads(shape: "Shape", most_heads: int) -> bool:
    """Whether tiles are made of this cache's blocks, and a product has room for the heads of a kv head."""
    boxed = shape.block_size % CACHE_TILE == 0 or shape.block_size in (16, 32)
    return shape.head_dim in (64, 128) and boxed and shape.heads // shape.kv_heads <= most_heads


def rows_in_boxes(tensor: torch.Tensor, width: int, height: int) -> Any:
    """A descriptor of a contiguous 16-bit tensor as rows of `width`, brought `height` at a time."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(tensor, [tensor.numel() // width, width], [width, 1], [height, width], layout)
