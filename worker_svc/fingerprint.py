"""Under what the bits of a response hold: equal fingerprints and equal requests give equal bits.

Knows what bits depend on, and names each of it in words; a part says `any` where the self-test has shown that the bits
do not depend on it. Does not know requests. The scheduler adds where sampling happens.
"""

import hashlib
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from worker_svc.loading.snapshot import Snapshot

NUMERICS_VERSION = 2  # of the reduction orders in docs/numerics.md; a change of any bit of `invariant` raises it
PAGE = 4096
PAGES = 16  # of each tensor enter the hash; a tensor up to that size enters whole
TEXTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
ISA_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "bf16")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Every part is a word, so that two fingerprints that differ say in what."""

    numerics: str  # version and mode
    model: str  # hash of weights, config and tokenizer
    device: str  # its class: cpu, or the name of the GPU
    isa: str  # instruction set and vendor, or the compute capability
    arithmetic: str  # the paths that the self-test chose
    dtype: str
    kv_dtype: str
    leaves: str  # slices of the sum over K in row-parallel products
    torch: str
    triton: str  # "none" where it is not used
    threads: str  # "any", or their number where bits depend on it
    tp: str  # "any" where the tree is on

    def parts(self) -> Mapping[str, str]:
        return asdict(self)


def numerics_part(mode: str) -> str:
    return f"{mode}-{NUMERICS_VERSION}"


def cpu_isa() -> str:
    """What libraries choose their code by on this CPU."""
    vendor, flags = platform.machine(), set[str]()
    for line in _cpuinfo():
        key, _, value = line.partition(":")
        if key.strip() in ("vendor_id", "CPU implementer"):
            vendor = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = set(value.split())
            break
    present = [flag for flag in ISA_FLAGS if flag in flags]
    return " ".join([vendor, torch.backends.cpu.get_cpu_capability(), *present])


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def model_hash(snapshot: Snapshot) -> str:
    """Of small files whole, of tensors their names, types, shapes and pages spread evenly over their bytes."""
    state = hashlib.blake2b(digest_size=12)
    for name in TEXTS:
        path = snapshot.folder / name
        data = path.read_bytes() if path.exists() else b""
        state.update(f"{name} {len(data)} ".encode() + data)
    for name, tensor in sorted(snapshot.tensors.items()):
        state.update(f"{name} {tensor.dtype} {tensor.shape} ".encode())
        size = tensor.item_bytes
        for length in tensor.shape:
            size *= length
        for page in _pages(tensor.file, tensor.begin, size):
            state.update(page)
    return state.hexdigest()


def _pages(path: Path, begin: int, size: int) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        if size <= PAGE * PAGES:
            file.seek(begin)
            yield file.read(size)
            return
        for page in range(PAGES):
            file.seek(begin + (size - PAGE) * page // (PAGES - 1))
            yield file.read(PAGE)
