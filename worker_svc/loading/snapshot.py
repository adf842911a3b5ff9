"""A snapshot folder: its config, and where each tensor of its checkpoint lies.

Knows files, headers and the index; reads no tensor data. Does not know architectures. Invariant: a `Snapshot` that
exists is complete on disk: every shard parses, is as long as its header says, and agrees with the index. What does not
ends in `SnapshotRefused` before any port is bound, naming the file.
"""

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker_svc.spec import ModelRefused, read_json

ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class SnapshotRefused(ModelRefused):
    """Files of the snapshot are missing, damaged, or disagree with each other or with the architecture."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int  # absolute byte offset in the file

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Snapshot:
    folder: Path
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]


def open_snapshot(folder: Path) -> Snapshot:
    """Read config, index and headers. Raises ModelRefused."""
    if not folder.is_dir():
        raise SnapshotRefused([f"{folder} is not a folder"])
    config = read_json(folder / "config.json")
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise ModelRefused([f"quantised checkpoint: quantization_config.quant_method {method!r} is not supported"])
    index = _read_index(folder)
    files = sorted({folder / file for file in index.values()}) if index is not None else [folder / SINGLE]
    violations: list[str] = []
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        try:
            for name, tensor in _read_header(file):
                if name in tensors:
                    violations.append(f"{file}: tensor {name} is also in {tensors[name].file.name}")
                tensors[name] = tensor
        except SnapshotRefused as error:
            violations += error.violations
    if not violations and index is not None:
        violations += _disagreements(folder, index, tensors)
    if violations:
        raise SnapshotRefused(violations)
    return Snapshot(folder, config, tensors)


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX
    if not path.exists():
        if not (folder / SINGLE).exists():
            raise SnapshotRefused([f"{folder} holds neither {SINGLE} nor {INDEX}"])
        return None
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
        raise SnapshotRefused([f"{path}: weight_map must map tensor names to files"])
    return index


def _disagreements(folder: Path, index: dict[str, str], tensors: dict[str, StoredTensor]) -> Iterator[str]:
    for name, file in index.items():
        if name not in tensors:
            yield f"{folder / file}: tensor {name} is in the index but not in the file"
        elif tensors[name].file.name != Path(file).name:
            yield f"{folder / INDEX}: tensor {name} is said to be in {file} but is in {tensors[name].file.name}"
    for name, tensor in tensors.items():
        if name not in index:
            yield f"{tensor.file}: tensor {name} is in the file but not in the index"


def _read_header(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Tensors of one safetensors file: u64 header length, JSON header, data that it must account for to the byte."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if prefix == b"version ":
                raise SnapshotRefused([f"{path} is a git-lfs pointer, not the tensors themselves"])
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise SnapshotRefused([f"{path} is not a safetensors file: {size} bytes, header length {length}"])
            header = json.loads(file.read(length))
    except OSError as error:
        raise SnapshotRefused([f"{path}: {error.strerror}"]) from error
    except ValueError as error:
        if isinstance(error, ModelRefused):
            raise
        raise SnapshotRefused([f"{path}: the header is not JSON: {error}"]) from error
    if not isinstance(header, dict):
        raise SnapshotRefused([f"{path}: the header is not a JSON object"])
    header.pop("__metadata__", None)
    yield from _header_entries(path, header, 8 + length, size)


def _header_entries(path: Path, header: dict[str, Any], base: int, size: int) -> Iterator[tuple[str, StoredTensor]]:
    end = base
    try:
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        for name, entry in entries:
            dtype, shape, (begin, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            if dtype not in ITEM_BYTES:
                raise SnapshotRefused([f"{path}: tensor {name} has dtype {dtype}, which is not supported"])
            if base + begin != end or stop - begin != math.prod(shape) * ITEM_BYTES[dtype]:
                raise SnapshotRefused(
                    [f"{path}: tensor {name}: bytes {begin}..{stop} do not fit {dtype} {list(shape)}"]
                )
            end = base + stop
            yield name, StoredTensor(path, dtype, shape, base + begin)
    except (KeyError, TypeError, AttributeError) as error:
        raise SnapshotRefused([f"{path}: malformed header entry: {error!r}"]) from error
    if end != size:
        raise SnapshotRefused([f"{path} has {size} bytes where its header describes {end}: truncated or damaged"])
