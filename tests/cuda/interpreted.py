"""The CUDA runner where there is no GPU: kernels under the interpreter, streams and events as nothing."""

from contextlib import nullcontext

import pytest
import torch


class _Event:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def replace_cuda(patch: pytest.MonkeyPatch) -> None:
    """Make torch.cuda's calls that the runner uses harmless on a machine without it."""
    for name in ("set_device", "empty_cache", "synchronize", "reset_peak_memory_stats"):
        patch.setattr(torch.cuda, name, lambda *_: None)
    patch.setattr(torch.cuda, "Stream", lambda *_: None)
    patch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    patch.setattr(torch.cuda, "Event", _Event)
    patch.setattr(torch.cuda, "mem_get_info", lambda *_: (4 << 30, 4 << 30))
    patch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 0)
    patch.setattr(torch.cuda, "memory_allocated", lambda *_: 0)
    patch.setattr(torch.cuda, "get_device_name", lambda *_: "none")


def order_products(patch: pytest.MonkeyPatch) -> None:
    """Have the interpreter's products accumulate K in order, as a GPU's do; a library's order depends on the shape."""
    from triton.runtime import interpreter

    def dot(builder: object, a, b, acc, *_: object):  # type: ignore[no-untyped-def]
        total = acc.data.copy()
        for k in range(a.data.shape[-1]):
            total += a.data[:, k : k + 1] * b.data[k].astype(total.dtype)
        return interpreter.TensorHandle(total, acc.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
