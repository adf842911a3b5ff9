"""Collectives of a group within one host, at decode and prefill sizes: microseconds a call, and whether bits are right.

    python bench/collectives.py --tp 2 [--nccl] [--out FILE]

Ranks are processes, each on a device of its own where there are enough, else they share one (`shared`), and then times
say little, since their kernels take turns. Sums are of fp32 parts, rounded to bf16; each is compared with the plain
fold of all parts. Times are medians over replays of a CUDA graph of several calls, one after another. With --nccl the
library's are timed too, which needs a device a rank. Prints a table and one JSON document.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from worker_svc.cuda.group import NcclGroup, form_group
from worker_svc.cuda.peer_memory import exchange
from worker_svc.cuda.symmetric import SymmetricGroup
from worker_svc.ops.leaves import LeafPart, fold
from worker_svc.parallel.group import Group

HIDDEN = 4096
VOCABULARY = 151_936
DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PREFILLS = (2048, 8192)
LIMIT_S = 60.0
BUDGET_S = 2.0  # of one size


def timed(call: Callable[[], object], calls: int, group: Group) -> float:
    """Microseconds a call: the median over replays of a graph. All ranks replay as often."""
    call()
    group.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    group.barrier()
    took = []
    for _ in range(2):
        began = time.monotonic()
        graph.replay()
        torch.cuda.synchronize()
        took.append(time.monotonic() - began)
    longest = group.all_gather(torch.tensor([max(took)], device="cuda")).max().item()
    for _ in range(max(3, min(30, int(BUDGET_S / longest)))):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        took.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(took[2:]) / calls * 1e6


def part_of(rank: int, rows: int, width: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(rank + 1000 * rows)
    return torch.randn(rows, width, generator=generator, device="cuda")


def measure(group: Group, nccl: Group | None, rows: int, shared: bool) -> list[dict[str, Any]]:
    """Every collective of a step with so many rows."""
    assert isinstance(group, SymmetricGroup)
    leaf, calls = LeafPart(group.rank, 1, group.tp), 4 if shared or rows > 256 else 20
    mine = part_of(group.rank, rows, HIDDEN)
    want = fold([part_of(rank, rows, HIDDEN) for rank in range(group.tp)]).bfloat16()
    right = torch.equal(group.sum_leaves(mine[None], leaf, torch.bfloat16), want)
    half = mine.bfloat16()
    gathered = group.all_gather(half)
    right_too = all(torch.equal(gathered[r], part_of(r, rows, HIDDEN).bfloat16()) for r in range(group.tp))
    found = [
        ("sum fp32 to bf16", right, lambda: group.sum_leaves(mine[None], leaf, torch.bfloat16)),
        ("gather bf16", right_too, lambda: group.all_gather(half)),
    ]
    if nccl is not None:
        found.append(("nccl all-reduce bf16", None, lambda: nccl.all_reduce(half)))
        found.append(("nccl gather fp32", None, lambda: nccl.all_gather(mine)))
    if rows <= 256:
        logits = part_of(group.rank, rows, -(-VOCABULARY // group.tp // 1024) * 1024)
        found.append(("gather of logits fp32", None, lambda: group.all_gather(logits)))
    return [
        {"what": what, "rows": rows, "us": round(timed(call, calls, group), 2), "right": right}
        for what, right, call in found
    ]


def rank_main(rank: int, tp: int, folder: str, with_nccl: bool, rows: list[int]) -> None:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store: Store = FileStore(f"{folder}/store", tp)
    store.set_timeout(timedelta(seconds=LIMIT_S))
    group = form_group(store, rank, tp, device, 1, LIMIT_S)
    nccl = NcclGroup(PrefixStore("nccl", store), rank, tp, 1, LIMIT_S) if with_nccl else None
    shared = torch.cuda.device_count() < tp
    listed = []
    for height in rows:
        listed += measure(group, nccl, height, shared)
        if rank == 0:
            for line in listed[-5:]:
                if line["rows"] == height:
                    print(
                        f"{line['rows']:6d} rows  {line['what']:24s} {line['us']:10.1f} us  {line['right']}", flush=True
                    )
    group.barrier()
    if rank == 0:
        document = {
            "tp": tp, "shared": shared, "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            "hidden": HIDDEN, "vocabulary": VOCABULARY, "command": " ".join(sys.argv), "collectives": listed,
        }  # fmt: skip
        Path(folder, "out.json").write_text(json.dumps(document, indent=1))
    exchange(store, "end", rank, tp, b"", LIMIT_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--nccl", action="store_true", help="time NCCL's as well")
    parser.add_argument("--rows", type=int, nargs="+", default=[*DECODES, *PREFILLS])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        arguments = (options.tp, folder, options.nccl, options.rows)
        ranks = [context.Process(target=rank_main, args=(rank, *arguments)) for rank in range(options.tp)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            return 1
        text = Path(folder, "out.json").read_text()
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 0 if all(line["right"] is not False for line in json.loads(text)["collectives"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
