"""Find the fastest tile for each product of the given models on this GPU, and write the table that workers read.

    python bench/tune_cuda.py --model bench/configs/qwen3-8b bench/configs/qwen3-0.6b

Every candidate of a shape is timed in a CUDA graph over weights that do not fit the cache together, launches
depending on one another as in a step. Before it is timed a candidate must give the bits of the first: a tile that did
not would be dropped with a complaint, since a table must never change a bit. Takes one to two minutes for two models.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from worker_svc.cuda.matmul import Tile, linear  # noqa: E402
from worker_svc.cuda.tuning import BUCKETS, FOLDER, key, table, write_table  # noqa: E402
from worker_svc.models import check_snapshot  # noqa: E402

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
    heights = {16: (16, 64), 32: (32, 64), 64: (64,), 128: (64, 128), 256: (64, 128)}.get(bucket, ())
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


def shapes(folder: Path) -> Iterator[tuple[int, int, bool, bool]]:
    """(n, k, gated, head) of a model's products on one rank, but for those of experts (`tune_moe.py`)."""
    spec = check_snapshot(folder, weights=False).spec
    yield spec.q_size + 2 * spec.kv_size, spec.hidden_size, False, False
    yield spec.hidden_size, spec.q_size, False, False
    if spec.moe is None:
        yield 2 * spec.intermediate_size, spec.hidden_size, True, False
        yield spec.hidden_size, spec.intermediate_size, False, False
    yield spec.vocab_size, spec.hidden_size, False, True


def best(n: int, k: int, gated: bool, head: bool, bucket: int) -> Tile:
    height = 4096 if bucket == BUCKETS[-1] else bucket
    count = 2 if bucket == BUCKETS[-1] else max(2, min(12, WEIGHT_BYTES // (2 * n * k)))
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    x = torch.randn(height, k, device="cuda", dtype=torch.bfloat16)
    rows = torch.tensor([height], dtype=torch.int32, device="cuda")
    dtype = torch.float32 if head else torch.bfloat16
    library = graph_us([lambda w=w: torch.nn.functional.linear(x, w) for w in weights], 3)  # type: ignore[misc]
    want: Tensor | None = None
    timed: list[tuple[float, Tile]] = []
    for tile in candidates(bucket, dtype.itemsize):
        out = torch.full((height, n // 2 if gated else n), float("nan"), device="cuda", dtype=dtype)

        def launch(w: Tensor, out: Tensor = out, tile: Tile = tile) -> None:
            linear(x, w, out, rows, tile, gated=gated, dependent=True)

        launch(weights[0])
        want = out.clone() if want is None else want
        if not torch.equal(out, want):
            print(f"{tile} has other bits for {n}x{k}@{bucket}", file=sys.stderr)
            continue
        us = graph_us([lambda w=w: launch(w) for w in weights], 2)  # type: ignore[misc]
        if not timed or us < 1.05 * min(timed, key=lambda t: t[0])[0]:
            us = graph_us([lambda w=w: launch(w) for w in weights], 5)  # type: ignore[misc]
        timed.append((us, tile))
    us, tile = min(timed, key=lambda t: t[0])
    print(f"{n}x{k}{'g' if gated else ''}@{bucket}: {us:.1f} us, cuBLAS {library:.1f} us, {tile}", flush=True)
    return tile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, nargs="+", required=True, help="folders with a config.json")
    parser.add_argument("--out", type=Path, help="default: the table of this GPU in worker_svc/cuda/tuned")
    options = parser.parse_args()
    name = torch.cuda.get_device_name()
    path = options.out or FOLDER / f"{name.lower().replace(' ', '_')}.json"
    tiles = dict(table(name))
    for shape in dict.fromkeys(shape for folder in options.model for shape in shapes(folder)):
        n, k, gated, head = shape
        for bucket in BUCKETS if not head else (b for b in BUCKETS if b <= 256):
            tiles[key(n, k, bucket, gated)] = best(*shape, bucket)
            write_table(path, tiles)
    print(json.dumps({"table": str(path), "entries": len(tiles)}))


if __name__ == "__main__":
    main()
