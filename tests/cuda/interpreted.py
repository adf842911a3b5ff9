"""The CUDA runner where there is no GPU: kernels under the interpreter, streams and events as nothing."""

from contextlib import nullcontext
from types import FunctionType
from typing import Any

import numpy as np
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


def hasten() -> None:
    """Spare the interpreter what it does again and again to no effect, more than half of all time here.

    It looks for the language's functions at every call of a device function; spells out its table of types for every
    value; computes every sum of integers a second time for an assertion that it then does not make; and describes a
    tensor's extents anew for each.
    """
    from triton.runtime import interpreter

    core = interpreter.tl.core
    replace, replaced = interpreter._patch_lang, set[str]()
    find_type, types = interpreter._get_np_dtype, dict[str, np.dtype]()
    begin_block, blocks = core.block_type.__init__, dict[tuple[object, ...], dict[str, object]]()
    begin_tensor, tensors = core.tensor.__init__, dict[str, tuple[object, object]]()

    def replace_once(function: FunctionType) -> object:
        if (module := function.__module__) not in replaced:
            replaced.add(module)
            replace(function)
        return interpreter._LangPatchScope()  # nothing to restore

    def known_type(of: Any) -> np.dtype:
        if of.name not in types:
            types[of.name] = find_type(of)
        return types[of.name]

    def known_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[getattr(extent, "value", extent) for extent in shape])
        if key not in blocks:
            begin_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])

    def known_tensor(self: Any, handle: object, type: Any) -> None:
        shape = type.name if type.is_block() else ""
        if shape not in tensors:
            begin_tensor(self, handle, type)
            tensors[shape] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensors[shape]

    interpreter._patch_lang, interpreter._get_np_dtype = replace_once, known_type
    core.block_type.__init__, core.tensor.__init__ = known_block, known_tensor
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def order_products(patch: pytest.MonkeyPatch) -> None:
    """Have the interpreter's products accumulate K in order, as a GPU's do; a library's order depends on the shape."""
    from triton.runtime import interpreter

    def dot(builder: object, a, b, acc, *_: object):  # type: ignore[no-untyped-def]
        total = acc.data.copy()
        for k in range(a.data.shape[-1]):
            total += a.data[:, k : k + 1] * b.data[k].astype(total.dtype)
        return interpreter.TensorHandle(total, acc.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
