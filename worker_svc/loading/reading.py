"""Tensor data from a snapshot into a rank's parameters: only its slices, each byte once.

Knows byte offsets and casts. Does not know layers beyond the slices they declare. Invariant: bytes kept equal the bytes
of the declared slices in the checkpoint's dtype; no file is mapped, so peak memory is what is kept plus two bounded
buffers.

What is kept as it is stored is read to where it stays, by all threads, into huge pages where the kernel has them: page
by page, handing out fresh memory would take longer than reading. What is cast, or goes to another device, is read ahead
by one buffer.
"""

import contextlib
import math
import mmap
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import torch
from torch import Tensor

from worker_svc.layers.parameter import Parameter, Slice
from worker_svc.loading.runs import Ended, Runs, read
from worker_svc.loading.snapshot import DTYPE_NAMES, Snapshot, SnapshotRefused, StoredTensor

BUFFER_BYTES = 8 << 20
PIECE_BYTES = 1 << 20  # what a thread reads at a time
HUGE_BYTES = 2 << 20  # tensors from this size on lie in huge pages

Place: TypeAlias = tuple[int, Runs, memoryview]  # descriptor, which bytes of it, and where they go

# Buffers that some writers save; they hold nothing that the config does not say.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.masked_bias")


def check_inventory(snapshot: Snapshot, declared: Iterable[Slice], tied: tuple[str, str] | None = None) -> None:
    """The checkpoint's tensors must be exactly the architecture's. `tied`: (head, embedding), equal where both exist.

    Raises SnapshotRefused with every missing, extra or mis-shaped tensor.
    """
    wanted: dict[str, tuple[int, ...]] = {s.name: s.shape for s in declared}
    violations = []
    for name, shape in wanted.items():
        stored = snapshot.tensors.get(name)
        if stored is None:
            violations.append(f"{snapshot.folder}: tensor {name} is missing")
        elif stored.shape != shape:
            violations.append(f"{stored.file}: tensor {name} has shape {list(stored.shape)}, not {list(shape)}")
    for name, stored in snapshot.tensors.items():
        if tied is not None and name == tied[0] and not violations:
            if not _same_bytes(stored, snapshot.tensors[tied[1]]):
                violations.append(f"{stored.file}: tie_word_embeddings is true, but {name} differs from {tied[1]}")
        elif name not in wanted and not name.endswith(IGNORED_SUFFIXES):
            violations.append(f"{stored.file}: tensor {name} does not belong to this architecture")
    if violations:
        raise SnapshotRefused(violations)


class Reader:
    """Reads declared slices. `bytes_read` counts what came from the files."""

    def __init__(self, snapshot: Snapshot, dtype: torch.dtype, device: torch.device) -> None:
        self._snapshot = snapshot
        self._dtype = dtype
        self._device = device
        self._helpers = torch.get_num_threads() - 1
        self._pool = ThreadPoolExecutor(max(1, self._helpers), "reader")
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._files: dict[str, int] = {}
        self.bytes_read = 0

    def read(self, parameter: Parameter) -> Tensor:
        """The parameter's tensor on the device, contiguous and owned, cast from the checkpoint's dtype."""
        target = self._room(parameter.shape)
        row = 0
        kept: list[Place] = []
        for part in parameter.slices:
            rows = part.kept_shape[0]
            into = target[row : row + rows].view(-1)
            row += rows
            if not into.numel():
                continue
            stored = self._snapshot.tensors[part.name]
            if getattr(torch, DTYPE_NAMES[stored.dtype]) == self._dtype and self._device.type == "cpu":
                kept += _places(self._descriptor(stored), _runs(stored, part), _bytes_of(into))
            else:
                self._cast(stored, _runs(stored, part), into)
        self._read_all(kept)
        return target

    def close(self) -> None:
        self._pool.shutdown()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _room(self, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape) * self._dtype.itemsize
        if self._device.type != "cpu" or size < HUGE_BYTES:
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # lives as long as the tensor
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=self._dtype).view(shape)

    def _read_all(self, places: list[Place]) -> None:
        total = sum(len(into) for _, _, into in places)
        left = iter(places)  # taken one at a time by whoever is free
        waiting = [self._pool.submit(self._take, left) for _ in range(self._helpers if len(places) > 1 else 0)]
        try:
            self._take(left)
        finally:
            for future in waiting:
                future.result()
        self.bytes_read += total

    def _take(self, places: Iterable[Place]) -> None:
        for descriptor, runs, into in places:
            try:
                read(descriptor, runs, into)
            except Ended:
                file = next(name for name, known in self._files.items() if known == descriptor)
                raise SnapshotRefused([f"{file} ended while it was read"]) from None

    def _cast(self, stored: StoredTensor, runs: Runs, target: Tensor) -> None:
        """While one buffer is cast or sent to the device, the other one is filled."""
        descriptor, dtype = self._descriptor(stored), getattr(torch, DTYPE_NAMES[stored.dtype])
        self._buffers = self._buffers or (_buffer(), _buffer())
        pieces = runs.pieces(BUFFER_BYTES)

        def fill(piece: Runs, buffer: Tensor) -> Tensor:
            filled = buffer[: piece.size]
            self._take([(descriptor, piece, _bytes_of(filled))])
            return filled

        filled = self._pool.submit(fill, next(pieces), self._buffers[0])
        turn = done = 0
        while True:
            ready, piece = filled.result(), next(pieces, None)
            turn = 1 - turn
            if piece is not None:
                filled = self._pool.submit(fill, piece, self._buffers[turn])
            self.bytes_read += len(ready)
            values = ready.view(dtype)
            target[done : done + len(values)].copy_(values)
            done += len(values)
            if piece is None:
                return

    def _descriptor(self, stored: StoredTensor) -> int:
        key = str(stored.file)
        if key not in self._files:
            self._files[key] = os.open(key, os.O_RDONLY)
        return self._files[key]


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _buffer() -> Tensor:
    return torch.empty(BUFFER_BYTES, dtype=torch.uint8)


def _runs(stored: StoredTensor, part: Slice) -> Runs:
    """A slice along `dim` as bytes of its file, in order."""
    inner = math.prod(stored.shape[part.dim + 1 :]) * stored.item_bytes
    count, stride = len(part.part) * inner, stored.shape[part.dim] * inner
    repeats, offset = math.prod(stored.shape[: part.dim]), stored.begin + part.part.start * inner
    if count == stride:
        return Runs(offset, repeats * count)
    return Runs(offset, count, stride, repeats)


def _places(descriptor: int, runs: Runs, into: memoryview) -> Iterator[Place]:
    """Each piece with its part of `into`, one after the other."""
    done = 0
    for piece in runs.pieces(PIECE_BYTES):
        yield descriptor, piece, into[done : done + piece.size]
        done += piece.size


def _same_bytes(a: StoredTensor, b: StoredTensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    left, size = a.begin, math.prod(a.shape) * a.item_bytes
    with a.file.open("rb") as first, b.file.open("rb") as second:
        first.seek(left)
        second.seek(b.begin)
        for done in range(0, size, BUFFER_BYTES):
            count = min(BUFFER_BYTES, size - done)
            if first.read(count) != second.read(count):
                return False
    return True
