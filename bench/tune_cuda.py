"""Find the fastest tile for each product of the given models on this GPU, and write the table that workers read.

    python bench/tune_cuda.py --model bench/configs/qwen3-8b bench/configs/qwen3-0.6b [--hopper [--rows 1 64 256]]

With --hopper only tiles of the hand-written Hopper kernel are timed, against the table's tile, for steps of some
numbers of rows; one is taken where it is 2 % faster. Each was tried in another process before (`hopper_candidates.py`).
Every candidate of a shape is timed in a CUDA graph over weights that do not fit the cache together, launches
depending on one another as in a step. Before it is timed a candidate must give the bits of the first: a tile that did
not would be dropped with a complaint, since a table must never change a bit. Takes one to two minutes for two models,
as long again with Hopper's.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import hopper_candidates  # noqa: E402

from worker_svc.cuda import matmul_hopper  # noqa: E402
from worker_svc.cuda.hopper import processors  # noqa: E402
from worker_svc.cuda.matmul import Tile, linear  # noqa: E402
from worker_svc.cuda.ops import FEW_ROWS  # noqa: E402
from worker_svc.cuda.tuning import BUCKETS, FOLDER, bucket_of, key, table, tile_for, write_table  # noqa: E402
from worker_svc.models import check_snapshot  # noqa: E402

Shape = tuple[int, int, bool, bool]  # n, k, gated, head
SHARED_BYTES = 227 << 10  # of a multiprocessor, usable by one program
WEIGHT_BYTES = 500 << 20  # rotated through, so that none is in the cache
# (block_n, block_k, stages, warps)
FEW = (
    (16, 256, 4, 4), (16, 256, 6, 4), (16, 512, 4, 4), (32, 128, 6, 4), (32, 256, 3, 4), (32, 256, 4, 4),
    (32, 256, 6, 4), (32, 512, 3, 4), (64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 6, 4), (64, 256, 3, 4),
    (64, 256, 4, 8), (64, 64, 6, 4), (128, 64, 4, 4), (128, 128, 3, 4), (128, 64, 6, 8), (128, 128, 4, 8),
    (128, 64, 4, 8), (256, 64, 4, 8),
)  # fmt: skip
# (block_m, block_n, block_k, stages, warps)
MANY = (
    (128, 128, 64, 4, 8), (128, 128, 64, 5, 8), (128, 256, 64, 3, 8), (128, 256, 64, 4, 8), (128, 64, 64, 6, 4),
    (128, 64, 128, 4, 4), (64, 256, 64, 4, 4), (256, 128, 64, 3, 8), (256, 128, 64, 4, 8), (64, 128, 128, 4, 4),
    (64, 128, 64, 6, 4), (128, 128, 128, 3, 8), (256, 64, 64, 4, 8), (64, 64, 128, 5, 4),
)  # fmt: skip


def fits(tile: Tile, out_bytes: int) -> bool:
    stores = tile.block_m * tile.block_n * out_bytes if tile.persistent else 0
    return tile.stages * (tile.block_m + tile.block_n) * tile.block_k * 2 + stores <= SHARED_BYTES


def candidates(bucket: int, out_bytes: int) -> list[Tile]:
    heights = {8: (16, 64), 16: (16, 64), 32: (32, 64), 64: (64,), 128: (64, 128), 256: (64, 128)}.get(bucket, ())
    found = [Tile(m, *shape) for m in heights for shape in FEW if bucket < 256 or shape[0] >= 64]
    found += [replace(tile, prefetch_k=512) for tile in found if bucket <= 64 and tile.block_k >= 128]
    if bucket >= 128:
        groups = (8, 16) if bucket >= 512 else (8,)
        found += [Tile(*shape, persistent=True, group_m=group) for shape in MANY for group in groups]
    return [tile for tile in found if fits(tile, out_bytes)]


def graph_us(launches: list[Callable[[], None]], replays: int) -> float:
    """The median over replays of a graph of all launches, in microseconds a launch."""
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2] * 1e3 / len(launches)


def shapes(folder: Path) -> Iterator[Shape]:
    """(n, k, gated, head) of a model's products on one rank, but for those of experts (`tune_moe.py`)."""
    spec = check_snapshot(folder, weights=False).spec
    yield spec.q_size + 2 * spec.kv_size, spec.hidden_size, False, False
    yield spec.hidden_size, spec.q_size, False, False
    if spec.moe is None:
        yield 2 * spec.intermediate_size, spec.hidden_size, True, False
        yield spec.hidden_size, spec.intermediate_size, False, False
    yield spec.vocab_size, spec.hidden_size, False, True


def height_of(bucket: int) -> int:
    """Rows that a bucket is timed with: its most frequent number, or many."""
    return {BUCKETS[0]: 1, BUCKETS[-1]: 4096}.get(bucket, bucket)


def timed(shape: Shape, bucket: int, tiles: Iterable[Tile]) -> tuple[list[tuple[float, Tile]], float]:
    """Microseconds of each tile that gives the first one's bits, and of the library."""
    n, k, gated, head = shape
    height = height_of(bucket)
    count = 2 if bucket == BUCKETS[-1] else max(2, min(12, WEIGHT_BYTES // (2 * n * k)))
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    x = torch.randn(height, k, device="cuda", dtype=torch.bfloat16)
    rows = torch.tensor([height], dtype=torch.int32, device="cuda")
    dtype = torch.float32 if head else torch.bfloat16
    library = graph_us([lambda w=w: torch.nn.functional.linear(x, w) for w in weights], 3)  # type: ignore[misc]
    want: Tensor | None = None
    found: list[tuple[float, Tile]] = []
    for tile in tiles:
        out = torch.full((height, n // 2 if gated else n), float("nan"), device="cuda", dtype=dtype)

        def launch(w: Tensor, out: Tensor = out, tile: Tile = tile) -> None:
            linear(x, w, out, rows, tile, gated=gated, dependent=height <= FEW_ROWS)

        launch(weights[0])
        want = out.clone() if want is None else want
        if not torch.equal(out, want):
            print(f"{tile} has other bits for {n}x{k}@{bucket}", file=sys.stderr)
            continue
        us = graph_us([lambda w=w: launch(w) for w in weights], 2)  # type: ignore[misc]
        if not found or us < 1.05 * min(found, key=lambda t: t[0])[0]:
            us = graph_us([lambda w=w: launch(w) for w in weights], 9)  # type: ignore[misc]
        found.append((us, tile))
    return found, library


def hopper_tiles(cases: Iterable[tuple[Shape, int]], name: str, seconds: float) -> dict[tuple[Shape, int], list[Tile]]:
    """Tiles of Hopper's kernel that passed their trial, by product and bucket; none where there is no such kernel."""
    if matmul_hopper.kernel() is None:
        return {case: [] for case in cases}
    wanted: dict[tuple[Shape, int], dict[Tile, hopper_candidates.Job]] = {}
    extra = set()
    for shape, bucket in cases:
        n, k, gated, head = shape
        height = height_of(bucket)

        def job(tile: Tile, gated: bool = gated, head: bool = head, height: int = height) -> hopper_candidates.Job:
            return hopper_candidates.Job(tile, gated, head, height <= FEW_ROWS, height <= tile.block_m)

        tiles = hopper_candidates.candidates(n, gated, head, bucket, processors(0))
        wanted[shape, bucket] = {tile: job(tile) for tile in tiles}
        extra.add(job(tile_for(name, n, k, bucket, gated=gated)))  # tried for being compiled
    jobs = [job for of in wanted.values() for job in of.values()]
    right = hopper_candidates.passed([*jobs, *extra], children=10, seconds=seconds)
    print(f"{len(right)} of {len({*jobs, *extra})} tiles gave the right bits in a trial", flush=True)
    return {case: [tile for tile, job in of.items() if job in right] for case, of in wanted.items()}


def rate(shape: Shape, bucket: int, us: float) -> str:
    n, k, *_ = shape
    if bucket <= 64:
        return f"{2e-3 * n * k / us:.0f} GB/s"
    return f"{2e-6 * n * k * height_of(bucket) / us:.0f} TFLOP/s"


def tune_hopper(folders: list[Path], buckets: list[int], name: str, path: Path, tiles: dict[str, Tile]) -> None:
    """Offer Hopper's tiles to the table, and say what that changes in a decode step."""
    listed = list(dict.fromkeys(shape for folder in folders for shape in shapes(folder)))
    cases = [(shape, bucket) for shape in listed for bucket in buckets if not (shape[3] and bucket > 256)]
    offered = hopper_tiles(cases, name, seconds=90)
    us: dict[tuple[Shape, int], tuple[float, float]] = {}
    for (shape, bucket), found in offered.items():
        n, k, gated, _ = shape
        old = tile_for(name, n, k, bucket, gated=gated)
        times, library = timed(shape, bucket, dict.fromkeys([old, *found]))
        before = next(us for us, tile in times if tile == old)
        after, tile = min(times, key=lambda t: t[0])
        if after > 0.98 * before:
            after, tile = before, old
        tiles[key(n, k, bucket, gated)] = tile
        write_table(path, tiles)
        us[shape, bucket] = before, after
        print(
            f"{key(n, k, bucket, gated)}: old {before:.1f} us {rate(shape, bucket, before)}, new {after:.1f} us "
            f"{rate(shape, bucket, after)}, cuBLAS {library:.1f} us, {tile}",
            flush=True,
        )
    for folder in folders:
        layers = check_snapshot(folder, weights=False).spec.num_layers
        for bucket in buckets:
            parts = [
                (us[shape, bucket], 1 if shape[3] else layers) for shape in shapes(folder) if (shape, bucket) in us
            ]
            old_ms, new_ms = (sum(count * pair[i] for pair, count in parts) / 1e3 for i in (0, 1))
            print(f"{folder.name}, {height_of(bucket)} rows: products of a step {old_ms:.3f} ms, now {new_ms:.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, nargs="+", required=True, help="folders with a config.json")
    parser.add_argument("--out", type=Path, help="default: the table of this GPU in worker_svc/cuda/tuned")
    parser.add_argument("--hopper", action="store_true", help="time only the Hopper kernel, against the table")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256], help="of the steps, with --hopper")
    options = parser.parse_args()
    name = torch.cuda.get_device_name()
    path = options.out or FOLDER / f"{name.lower().replace(' ', '_')}.json"
    tiles = dict(table(name))
    if options.hopper:
        tune_hopper(options.model, [bucket_of(rows) for rows in options.rows], name, path, tiles)
    else:
        listed = list(dict.fromkeys(shape for folder in options.model for shape in shapes(folder)))
        cases = [(shape, b) for shape in listed for b in BUCKETS if not (shape[3] and b > 256)]
        offered = hopper_tiles(cases, name, seconds=200)
        for (shape, bucket), found in offered.items():
            n, k, gated, head = shape
            few = candidates(bucket, 4 if head else 2)
            times, library = timed(shape, bucket, few + found)
            us, tile = min(times, key=lambda t: t[0])
            print(f"{key(n, k, bucket, gated)}: {us:.1f} us, cuBLAS {library:.1f} us, {tile}", flush=True)
            tiles[key(n, k, bucket, gated)] = tile
            write_table(path, tiles)
    print(json.dumps({"table": str(path), "entries": len(tiles)}))


if __name__ == "__main__":
    main()
