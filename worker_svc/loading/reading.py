"""Tensor data from a snapshot into a rank's parameters: only its slices, each byte once.

Knows byte offsets and casts. Does not know layers beyond the slices they declare. Invariant: bytes read from disk equal
the bytes of the declared slices in the checkpoint's dtype; nothing is mapped, so peak memory is what is kept plus one
bounded buffer.
"""

import math
import os
from collections.abc import Iterable

import torch
from torch import Tensor

from worker_svc.layers.parameter import Parameter, Slice
from worker_svc.loading.snapshot import DTYPE_NAMES, Snapshot, SnapshotRefused, StoredTensor

BUFFER_BYTES = 16 << 20

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
        self._buffer = bytearray()
        self._files: dict[str, int] = {}
        self.bytes_read = 0

    def read(self, parameter: Parameter) -> Tensor:
        """The parameter's tensor on the device, contiguous and owned, cast from the checkpoint's dtype."""
        target = torch.empty(parameter.shape, dtype=self._dtype, device=self._device)
        row = 0
        for part in parameter.slices:
            rows = part.kept_shape[0]
            self._read_into(target[row : row + rows], part)
            row += rows
        return target

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _read_into(self, target: Tensor, part: Slice) -> None:
        if not target.numel():
            return
        stored = self._snapshot.tensors[part.name]
        source_dtype = getattr(torch, DTYPE_NAMES[stored.dtype])
        # A slice along `dim` is `runs` runs of contiguous items, `stride` apart.
        inner = math.prod(stored.shape[part.dim + 1 :])
        run, stride = len(part.part) * inner, stored.shape[part.dim] * inner
        runs, first = math.prod(stored.shape[: part.dim]), part.part.start * inner
        flat, item = target.view(-1), stored.item_bytes
        if run == stride:
            runs, run, stride = 1, runs * run, runs * stride
        if source_dtype == self._dtype and self._device.type == "cpu":
            bytes_of = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
            for r in range(runs):
                into = bytes_of[r * run * item : (r + 1) * run * item]
                self._pread(stored, into, stored.begin + (r * stride + first) * item)
            return
        step = max(1, BUFFER_BYTES // item)
        done = 0
        pieces = ((r * stride + first + o, min(step, run - o)) for r in range(runs) for o in range(0, run, step))
        for chunk in _batches(pieces, step):
            items = sum(count for _, count in chunk)
            buffer = self._room(items * item)
            filled = 0
            for offset, count in chunk:
                self._pread(stored, buffer[filled : filled + count * item], stored.begin + offset * item)
                filled += count * item
            flat[done : done + items].copy_(torch.frombuffer(buffer, dtype=source_dtype, count=items))
            done += items

    def _room(self, size: int) -> memoryview:
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        return memoryview(self._buffer)[:size]

    def _pread(self, stored: StoredTensor, into: memoryview, offset: int) -> None:
        key = str(stored.file)
        if key not in self._files:
            self._files[key] = os.open(key, os.O_RDONLY)
        got = 0
        while got < len(into):
            count = os.preadv(self._files[key], [into[got:]], offset + got)
            if count == 0:
                raise SnapshotRefused([f"{stored.file} ended while it was read"])
            got += count
        self.bytes_read += got


def _batches(pieces: Iterable[tuple[int, int]], limit: int) -> Iterable[list[tuple[int, int]]]:
    """Consecutive pieces whose items together stay within `limit`."""
    batch: list[tuple[int, int]] = []
    held = 0
    for piece in pieces:
        if batch and held + piece[1] > limit:
            yield batch
            batch, held = [], 0
        batch.append(piece)
        held += piece[1]
    if batch:
        yield batch


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
