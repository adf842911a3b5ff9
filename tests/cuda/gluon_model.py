"""Gluon's Hopper operations in plain Python: a kernel's own functions run on it, a thread a partition.

Knows what the kernels here use. Layouts mean nothing, products are fp32, a row of memory is a tensor. What is modelled
is order, everything as late as it may be: a copy arrives when somebody waits for it and its slot is NaN until then, a
product reads its operands when it is waited for, and a wait that nobody answers in time fails. So a tile read early, a
slot given back early or a phase miscounted is a wrong number or an error.
"""

import threading
import types
from collections.abc import Callable
from typing import Any

import torch

PATIENCE_S = 20.0


class Stuck(Exception):
    """A wait for something that did not come."""


class Pointer:
    """Addresses of a flat tensor's elements."""

    def __init__(self, tensor: torch.Tensor, offset: Any = 0) -> None:
        self.tensor, self.offset = tensor, offset

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.tensor, self.offset + offset)


class Shared:
    """A shared memory descriptor: a view of a tensor."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.dtype = data, data.dtype

    def index(self, i: Any) -> "Shared":
        assert 0 <= int(i) < len(self.data)
        return Shared(self.data[int(i)])

    def slice(self, start: int, length: int, dim: int) -> "Shared":
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.data.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> "Shared":
        assert self.data.shape[-1] == shape[-1]
        return Shared(self.data.as_strided(shape, (shape[-1], 1), self.data.storage_offset()))

    def load(self, layout: Any = None) -> torch.Tensor:
        return self.data.clone()

    def store(self, value: torch.Tensor) -> None:
        self.data.copy_(value)


class Descriptor:
    """A tensor map over rows, with boxes of some height. Rows past the end are zeros."""

    def __init__(self, rows: torch.Tensor, height: int) -> None:
        self.rows, self.block_shape, self.dtype, self.layout = rows, [height, rows.shape[1]], rows.dtype, None

    def box(self, first: int) -> torch.Tensor:
        assert 0 <= first < len(self.rows)
        found = torch.zeros(self.block_shape, dtype=self.dtype)
        part = self.rows[first : first + len(found)]
        found[: len(part)] = part
        return found


class Barrier:
    def __init__(self) -> None:
        self.phase, self.count, self.pending, self.bytes = 0, 0, 0, 0
        self.copies: list[Callable[[], None]] = []


class Barriers:
    """Stands for a shared memory descriptor of barriers."""

    def __init__(self, number: int) -> None:
        self.each = [Barrier() for _ in range(number)]

    def index(self, i: Any) -> Barrier:
        assert int(i) >= 0
        return self.each[int(i)]


class Model:
    """One program's run. Use `run` on a kernel whose last act is its warp specialisation."""

    def __init__(self, program: int, programs: int) -> None:
        self.program, self.programs = program, programs
        self.changed = threading.Condition()
        self.failed: list[BaseException] = []

    def run(self, module: types.ModuleType, kernel: str, *args: Any, **constants: Any) -> None:
        names = dict(vars(module))
        for value in list(names.values()):
            if hasattr(value, "fn") and hasattr(value.fn, "__globals__"):  # a part of the kernel from another module
                names = value.fn.__globals__ | names
        for name, value in names.items():
            if hasattr(value, "fn") and hasattr(value.fn, "__code__"):
                names[name] = types.FunctionType(value.fn.__code__, names, name)
            elif hasattr(value, "value") and isinstance(value.value, int):
                names[name] = value.value
        names.update(gl=self, mbarrier=self, tma=self, warpgroup_mma=self.ask, warpgroup_mma_wait=self.answers)
        names["fence_async_shared"] = self.thread_barrier
        names[kernel](*args, **constants)
        if self.failed:
            raise self.failed[0]

    # Partitions, and the barriers between them

    def warp_specialize(self, parts: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: Any, registers: Any):
        def part(function: Callable[..., None], args: tuple[Any, ...]) -> None:
            try:
                function(*args)
            except BaseException as error:
                self.failed.append(error)

        threads = [threading.Thread(target=part, args=of, daemon=True) for of in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE_S)

    def MBarrierLayout(self) -> None:
        return None

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.pending = count

    def _complete(self, barrier: Barrier) -> None:
        if barrier.pending == 0 and barrier.bytes == 0:
            barrier.phase, barrier.pending = barrier.phase + 1, barrier.count
            self.changed.notify_all()

    def arrive(self, barrier: Barrier, pred: Any = True) -> None:
        if pred:
            with self.changed:
                assert barrier.pending > 0, "more arrivals than a phase has"
                barrier.pending -= 1
                self._complete(barrier)

    def expect(self, barrier: Barrier, count: int) -> None:
        with self.changed:
            assert barrier.pending > 0, "bytes expected twice in a phase"
            barrier.pending, barrier.bytes = barrier.pending - 1, barrier.bytes + count
            self._complete(barrier)

    def wait(self, barrier: Barrier, parity: Any) -> None:
        def done() -> bool:
            copies, barrier.copies = barrier.copies, []
            for copy in copies:
                copy()
            return bool(self.failed) or barrier.phase & 1 != int(parity)

        with self.changed:
            if not self.changed.wait_for(done, PATIENCE_S) or self.failed:
                raise Stuck

    def async_copy_global_to_shared(self, desc: Descriptor, at: list[Any], barrier: Barrier, to: Shared) -> None:
        box = desc.box(int(at[0]))
        to.data.fill_(float("nan"))

        def arrives() -> None:
            to.data.copy_(box)
            barrier.bytes -= box.numel() * 2
            self._complete(barrier)

        with self.changed:
            barrier.copies.append(arrives)
            self.changed.notify_all()

    # Products

    def ask(self, a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False):
        def product() -> torch.Tensor:
            left = a.data if isinstance(a, Shared) else a
            found = left.float() @ b.data.float()
            return found + acc if use_acc else found

        return product

    def answers(self, num_outstanding: int = 0, deps: tuple[Callable[[], torch.Tensor], ...] = ()):
        assert num_outstanding == 0
        return tuple(product() for product in deps)

    # The language

    int64, float32, constexpr = torch.int64, torch.float32, staticmethod(lambda x: x)
    zeros_like = staticmethod(torch.zeros_like)
    exp2, expand_dims = staticmethod(torch.exp2), staticmethod(torch.unsqueeze)
    rsqrt, reshape, permute = staticmethod(torch.rsqrt), staticmethod(torch.reshape), staticmethod(torch.permute)
    sum = staticmethod(torch.sum)

    def join(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.stack((x, y), -1)

    def NVMMADistributedLayout(self, *_: Any) -> None: ...
    def SliceLayout(self, *_: Any) -> None: ...
    def DotOperandLayout(self, *_: Any) -> None: ...
    def BlockedLayout(self, *_: Any) -> None: ...
    def SwizzledSharedLayout(self, *_: Any) -> None: ...
    def static_assert(self, holds: bool) -> None:
        assert holds

    def thread_barrier(self) -> None: ...
    def program_id(self, _: int) -> int:
        return self.program

    def num_programs(self, _: int) -> int:
        return self.programs

    static_range = staticmethod(range)

    def allocate_shared_memory(self, kind: torch.dtype, shape: list[int], layout: Any):
        if kind == torch.int64:
            return Barriers(shape[0])
        return Shared(torch.full(shape, float("nan"), dtype=kind))

    def arange(self, start: int, end: int, layout: Any = None) -> torch.Tensor:
        return torch.arange(start, end)

    def full(self, shape: list[int], value: float, kind: torch.dtype, layout: Any = None) -> torch.Tensor:
        return torch.full(shape, value, dtype=kind)

    def zeros(self, shape: list[int], kind: torch.dtype, layout: Any = None) -> torch.Tensor:
        return torch.zeros(shape, dtype=kind)

    def where(self, condition: torch.Tensor, x: Any, y: Any) -> torch.Tensor:
        return torch.where(condition, x, y)

    def fma(self, x: torch.Tensor, y: float, z: torch.Tensor) -> torch.Tensor:
        return x * y + z

    def inline_asm_elementwise(self, text: str, constraints: str, args: list[torch.Tensor], **_: Any) -> torch.Tensor:
        assert text.startswith("mul.rn.f32")
        return args[0] * args[1]

    def minimum(self, x: Any, y: Any) -> Any:
        return x if x < y else y

    def maximum(self, x: Any, y: Any) -> torch.Tensor:
        return torch.maximum(x, y)

    def reduce(self, values: tuple[torch.Tensor, ...], axis: int, combine: Callable[..., Any]):
        found = tuple(value.select(axis, 0) for value in values)
        for i in range(1, values[0].shape[axis]):
            found = combine(*found, *(value.select(axis, i) for value in values))
        return found

    def load(self, pointer: Pointer, mask: torch.Tensor | None = None, other: float = 0.0) -> Any:
        at = torch.as_tensor(pointer.offset)
        if mask is not None:
            return torch.where(mask, pointer.tensor[torch.where(mask, at, 0)], other)
        assert int(at.min()) >= 0
        return pointer.tensor[at]

    def store(self, pointer: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
        at, value, mask = torch.broadcast_tensors(pointer.offset, value, mask)
        pointer.tensor[at[mask]] = value[mask]
