"""How long a rank takes to load its shard, against reading the same bytes.

    python bench/load_time.py [--layers N] [--rounds N] [--threads N] [--config FILE] [--json FILE]

Makes a sharded bf16 snapshot of random weights (Qwen3-1.7B's shapes with --layers layers, or a config of yours) in a
temporary folder and measures, one after the other and in --rounds rounds, each in processes of its own:

    read        the files' bytes from the page cache into buffers that are used again (1 MiB a thread), nothing kept
    keep        the same into fresh memory (huge pages), kept: what no loader that holds its weights can go below
    load        the worker's loader, weights left as they were read (numerics `fast` over the library's product)
    pack        `load` with the product of the worker's own (numerics `invariant`): what a worker on a CPU does

and `read`, `load` and `pack` again for two ranks at a time, each a process with half of the threads and its share of
the bytes. A figure is the median over the rounds of the wall time of the slowest rank; ratios are to `read` and `keep`
of as many ranks, of CPU time to `keep` too, which other work on the machine disturbs less; what packing takes is `pack`
less `load`. `peak less shard` is a rank's largest anonymous memory while it loads, less what it had before, less the
bytes of its shard; at most 64 MiB are allowed.

A virtual machine is given its memory by the host at the first touch, ten times more slowly than the kernel hands out a
page; so each process first touches as much as it will need and frees it again (--cold leaves that out).
"""

import argparse
import json
import math
import mmap
import multiprocessing
import os
import re
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.invariant_cost import available_cores, processor

SHAPE: dict[str, Any] = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    hidden_size=2048,
    intermediate_size=6144,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1000000,
    tie_word_embeddings=True,
    hidden_act="silu",
    attention_bias=False,
    torch_dtype="bfloat16",
)
SHARD_BYTES = 1 << 30
PIECE = 1 << 20
ALLOWED_PEAK = 64 << 20


@dataclass(frozen=True)
class Share:
    """One rank's part in one measurement, as its process is told."""

    kind: str
    folder: Path
    rank: int
    tp: int
    threads: int
    touch: bool


@dataclass(frozen=True)
class Took:
    seconds: float
    cpu_seconds: float
    peak_bytes: int  # anonymous memory above the start
    bytes: int  # read from the files


@dataclass(frozen=True)
class Figure:
    kind: str
    ranks: int
    seconds: float
    cpu_seconds: float  # of all ranks together
    gigabytes_per_s: float
    to_read: float  # seconds to those of `read` and `keep` of as many ranks
    to_keep: float
    cpu_to_keep: float
    spare_mib: float  # of the hungriest rank: peak less its shard
    all_seconds: tuple[float, ...]


# --- the snapshot --------------------------------------------------------------------------------------------------


def write_snapshot(folder: Path, config: dict[str, Any]) -> int:
    """Sharded safetensors with the tensors that the worker expects of `config`; their bytes."""
    import torch

    from worker_svc.models.decoder import Decoder
    from worker_svc.models.load import NO_OPS, read_spec
    from worker_svc.spec import Shard

    family, spec = read_spec(config)
    parameters = Decoder(family, spec, Shard(), NO_OPS).parameters()
    shapes = {part.name: part.shape for parameter in parameters for part in parameter.slices}
    weights = torch.empty(8 << 20, dtype=torch.bfloat16).normal_(0, 0.02).view(torch.uint8).numpy().tobytes()
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        if filled >= SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += 2 * math.prod(shape)
    index = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        index |= dict.fromkeys(names, file)
        _write_shard(folder / file, {name: shapes[name] for name in names}, weights)
    total = 2 * sum(math.prod(shape) for shape in shapes.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    return total


def _write_shard(path: Path, shapes: dict[str, tuple[int, ...]], weights: bytes) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for begin in range(0, end, len(weights)):
            file.write(weights[: end - begin])


# --- what is measured ----------------------------------------------------------------------------------------------


def read_files(share: Share, total: int, *, keep: bool) -> int:
    """Every rank reads its consecutive part of the bytes of all files, cut among threads."""
    files = sorted(share.folder.glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    begin, end = (sum(sizes) * r // share.tp for r in (share.rank, share.rank + 1))
    spans, at = [], 0  # (descriptor, offset in the file, bytes)
    for file, size in zip(files, sizes, strict=True):
        first, last = max(begin, at), min(end, at + size)
        if first < last:
            spans.append((os.open(file, os.O_RDONLY), first - at, last - first))
        at += size
    kept = mmap.mmap(-1, end - begin, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if keep else None
    if kept is not None:
        kept.madvise(mmap.MADV_HUGEPAGE)
    into = memoryview(kept) if kept is not None else None

    def work(thread: int) -> None:
        again = memoryview(mmap.mmap(-1, PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        done = 0
        for descriptor, offset, size in spans:
            for piece in range(thread * PIECE, size, share.threads * PIECE):
                count = min(PIECE, size - piece)
                room = again[:count] if into is None else into[done + piece : done + piece + count]
                got = os.preadv(descriptor, [room], offset + piece)
                assert got == count
            done += size

    with ThreadPoolExecutor(share.threads) as pool:
        list(pool.map(work, range(share.threads)))
    for descriptor, _, _ in spans:
        os.close(descriptor)
    return end - begin


def loader(share: Share) -> Callable[[], int]:
    """Everything but loading done: the self-test has run and loops are compiled."""
    import torch

    from worker_svc.models.load import load_model, make_ops
    from worker_svc.ops.cpu import CpuOps
    from worker_svc.ops.invariance import Numerics
    from worker_svc.ops.matmul import MatmulPath

    torch.set_num_threads(share.threads)
    if share.kind == "pack":
        ops: CpuOps = make_ops(torch.bfloat16, "invariant", torch.device("cpu"))  # type: ignore[assignment]
    else:
        make_ops(torch.bfloat16, "invariant", torch.device("cpu"))  # its memory is not loading
        ops = CpuOps(torch.bfloat16, Numerics(MatmulPath("blas"), 1, True, leaves=False))
    return lambda: load_model(share.folder, rank=share.rank, tp=share.tp, dtype="bfloat16", ops=ops).bytes_read


def anonymous_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@contextmanager
def watched() -> Iterator[list[int]]:
    """[the largest anonymous memory so far], looked at every few milliseconds."""
    largest, done = [anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            largest[0] = max(largest[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield largest
    finally:
        done.set()
        watcher.join()


def touched(size: int) -> mmap.mmap:
    """So much memory that the host has backed; closed, it goes to the kernel's free list."""
    room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.madvise(mmap.MADV_HUGEPAGE)
    for page in range(0, size, mmap.PAGESIZE):
        room[page] = 1
    return room


def rank_process(share: Share, total: int, parent: Connection) -> None:
    load = loader(share) if share.kind in ("load", "pack") else None
    room = touched(total // share.tp + (total // share.tp >> 2)) if share.touch and share.kind != "read" else None
    parent.send(None)
    parent.recv()  # every rank has touched its own before one frees it
    if room is not None:
        room.close()
    before = anonymous_bytes()
    with watched() as largest:
        began, cpu_began = time.perf_counter(), time.process_time()
        count = load() if load else read_files(share, total, keep=share.kind == "keep")
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    parent.send(Took(seconds, cpu_seconds, largest[0] - before, count))


def run(share: Share, total: int) -> list[Took]:
    """All ranks of one measurement: ready, then started together."""
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for rank in range(share.tp):
        here, there = context.Pipe()
        process = context.Process(target=rank_process, args=(replace(share, rank=rank), total, there))
        process.start()
        ends.append(here)
        processes.append(process)
    for end in ends:
        end.recv()
    for end in ends:
        end.send(None)
    took = [end.recv() for end in ends]
    for process in processes:
        process.join()
    return took


CASES = [(kind, ranks) for ranks in (1, 2) for kind in ("read", "keep", "load", "pack")]


def measure(folder: Path, total: int, rounds: int, threads: int, *, warm: bool) -> list[Figure]:
    found: dict[tuple[str, int], list[list[Took]]] = {case: [] for case in CASES}
    for turn in range(rounds):
        for kind, ranks in CASES:
            took = run(Share(kind, folder, 0, ranks, max(1, threads // ranks), warm), total)
            found[kind, ranks].append(took)
            slowest = max(took, key=lambda t: t.seconds)
            print(f"round {turn} {kind:5} {ranks} {slowest.seconds:7.2f} s", file=sys.stderr, flush=True)
    seconds = {case: [max(t.seconds for t in took) for took in runs] for case, runs in found.items()}
    cpu = {case: statistics.median(sum(t.cpu_seconds for t in took) for took in runs) for case, runs in found.items()}
    figures = []
    for kind, ranks in CASES:
        runs, middle = found[kind, ranks], statistics.median(seconds[kind, ranks])
        spare = max(t.peak_bytes - t.bytes for took in runs for t in took)
        figures.append(
            Figure(
                kind,
                ranks,
                middle,
                cpu[kind, ranks],
                sum(t.bytes for t in runs[0]) / middle / 1e9,
                middle / statistics.median(seconds["read", ranks]),
                middle / statistics.median(seconds["keep", ranks]),
                cpu[kind, ranks] / cpu["keep", ranks],
                spare / (1 << 20),
                tuple(seconds[kind, ranks]),
            )
        )
    return figures


def table(figures: Sequence[Figure]) -> Iterator[str]:
    yield "what   ranks  seconds   GB/s  to read  to keep  cpu s  to keep   peak less shard"
    for f in figures:
        spare = f"{f.spare_mib:8.1f} MiB" if f.kind in ("load", "pack") else ""
        speed = f"{f.seconds:8.2f} {f.gigabytes_per_s:6.2f} {f.to_read:8.2f} {f.to_keep:8.2f}"
        yield f"{f.kind:6} {f.ranks:5} {speed} {f.cpu_seconds:6.2f} {f.cpu_to_keep:8.2f} {spare}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="a config.json; default: Qwen3-1.7B's shapes")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=available_cores(), help="of all ranks together")
    parser.add_argument("--cold", action="store_true", help="memory is not touched beforehand")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    config = json.loads(options.config.read_text()) if options.config else SHAPE
    config = config | {"num_hidden_layers": options.layers}
    load_average = os.getloadavg()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        total = write_snapshot(folder, config)
        figures = measure(folder, total, options.rounds, options.threads, warm=not options.cold)
    print("\n".join(table(figures)))
    if options.json:
        result = {
            "command": ["python", "bench/load_time.py", *(arguments or sys.argv[1:])],
            "cpu": processor(),
            "threads": options.threads,
            "load_average": {"before": load_average, "after": os.getloadavg()},
            "snapshot_bytes": total,
            "memory_touched_beforehand": not options.cold,
            "figures": [asdict(f) for f in figures],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
