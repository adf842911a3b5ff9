"""Tiles of kind "hopper" worth timing, and a trial of each in a process of its own.

A hand-written kernel can hang, and a hung kernel takes its process with it: so `passed` tries every tile in children
that are killed when they stand still, and keeps those that gave the bits of Triton's kernels. It also leaves all
kernels compiled in Triton's cache, many at a time.
"""

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from worker_svc.cuda import matmul_hopper  # noqa: E402
from worker_svc.cuda.matmul import Tile, linear  # noqa: E402

ALONE = 227 << 10  # bytes of shared memory, one program on a processor
TWO = 108 << 10  # of two: of one kernel, or of two that follow each other with a small one between them
STALL_S = 30.0  # a child that says nothing for so long hangs; a kernel compiles in a few seconds
# Many rows, one program a processor and two: (block_m, block_n, block_k, stages, warps)
MANY = (
    (64, 64, 64, 8, 4), (64, 128, 64, 8, 8), (64, 256, 64, 5, 8), (128, 64, 64, 7, 4), (128, 64, 128, 3, 4),
    (128, 128, 64, 5, 8), (128, 128, 128, 2, 8), (128, 192, 64, 4, 8), (128, 256, 64, 3, 8), (256, 64, 64, 4, 4),
    (256, 64, 64, 4, 8), (256, 128, 64, 3, 8), (256, 128, 64, 4, 8), (128, 256, 64, 4, 8),
)  # fmt: skip
PAIRED = ((64, 64, 64, 6, 4), (64, 128, 64, 4, 4), (128, 64, 64, 3, 4))


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel to try. head: fp32 out; one: x has no more rows than the tile."""

    tile: Tile
    gated: bool
    head: bool
    dependent: bool
    one: bool


def ring(height: int, cut: int, budget: int) -> tuple[int, int] | None:
    """(block_k, stages) that fill a budget of bytes: the widest step of which four fit, at most eight of them."""
    for block_k, fewest in ((512, 4), (256, 4), (128, 4), (64, 3)):
        base = Tile(height, cut, block_k, 0, 4, kind="hopper")
        room = budget - matmul_hopper.shared_bytes(base, torch.float32)
        stages = room // ((height + cut) * block_k * 2 + matmul_hopper.BARRIERS)
        if stages >= fewest:
            return block_k, min(stages, 8)
    return None


def cuts(n: int, step: int, processors: int) -> list[int]:
    """Heights of a tile of w: equal shares for one and for two programs a processor, and powers of two."""
    even = {-(-n // (processors * a * step)) * step for a in (1, 2, 3)}
    tried = even | {step, 16, 32, 64, 128}
    return sorted(
        cut for cut in tried
        if step <= cut <= 192 and n / cut > processors / 2.2 and (cut >= 64 or n / cut < 3.1 * processors)
    )  # fmt: skip


def candidates(n: int, gated: bool, head: bool, bucket: int, processors: int) -> list[Tile]:
    """Tiles for a product of a bucket's rows with w [n, K]."""
    step, found = 16 if gated else 8, []
    if bucket <= 64:
        for cut in cuts(n, step, processors):
            for budget, programs in ((TWO, 1), (TWO, 2), (ALONE, 1)):
                shape = ring(bucket, cut, budget)
                if shape and (programs == 1 or n / cut > processors):
                    found.append(Tile(bucket, cut, *shape, 4, kind="hopper", programs=programs))
    else:
        heights = {128: (64, 128), 256: (64, 128, 256)}.get(bucket, (128, 256))
        groups = (8, 16) if bucket >= 512 else (8,)
        listed = [(shape, 1) for shape in MANY] + [(shape, 2) for shape in PAIRED]
        found = [
            Tile(*shape, group_m=group, kind="hopper", programs=programs)
            for shape, programs in listed if shape[0] in heights for group in groups
        ]  # fmt: skip
        if bucket <= 256:  # all rows in a tile
            shapes = ((cut, ring(bucket, cut, ALONE)) for cut in cuts(n, step, processors) if 24 <= cut < 64)
            found += [Tile(bucket, cut, *shape, 4, kind="hopper") for cut, shape in shapes if shape]
    dtype = torch.float32 if head else torch.bfloat16
    fitting = (tile for tile in found if matmul_hopper.shared_bytes(tile, dtype, gated=gated) <= ALONE)
    roomy = (tile for tile in fitting if matmul_hopper.sums(tile) + 32 <= matmul_hopper.registers(tile))
    return list(dict.fromkeys(roomy))


def tried(job: Job) -> bool:
    """Whether the tile gives the bits of Triton's, over several tiles a program, with edges in every direction."""
    tile = job.tile
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    n = -(-(processors * tile.programs + 3) * tile.block_n // 32) * 32 + 32
    k = 5 * tile.block_k + 64
    height = tile.block_m if job.one else 2 * tile.block_m + 1
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(height, k, device="cuda", generator=generator).bfloat16()
    w = torch.randn(n, k, device="cuda", generator=generator).bfloat16()
    rows = torch.tensor([max(1, height - 1)], dtype=torch.int32, device="cuda")
    assert tile.kind == "triton" or matmul_hopper.fits(x, w, tile, gated=job.gated), "its twin would answer"
    outs = []
    for each in (tile, Tile(16, 64, 128, 3, 4)):
        out = torch.full(
            (height, n // 2 if job.gated else n), float("nan"), device="cuda",
            dtype=torch.float32 if job.head else torch.bfloat16,
        )  # fmt: skip
        for _ in range(2):  # the second follows the first, as in a step
            linear(x, w, out, rows, each, gated=job.gated, dependent=job.dependent)
        torch.cuda.synchronize()
        outs.append(out[: int(rows)])
    return torch.equal(*outs)


def passed(jobs: Iterable[Job], *, children: int, seconds: float) -> set[Job]:
    """Those of the jobs that gave the right bits; the others are named on stderr. Takes no longer than `seconds`."""
    todo, done, lock = list(dict.fromkeys(jobs)), set[Job](), threading.Lock()
    deadline = time.monotonic() + seconds

    def work(mine: list[Job]) -> None:
        while mine and time.monotonic() < deadline:
            answered = _child(mine, deadline)
            with lock:
                done.update(job for job, right in zip(mine, answered, strict=False) if right)
            mine = mine[len(answered) + 1 :]  # the one after the last answer hung, or ended the process

    threads = [threading.Thread(target=work, args=(todo[i::children],)) for i in range(children)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for job in todo:
        if job not in done:
            print(f"dropped, wrong or hanging or out of time: {job}", file=sys.stderr)
    return done


def _child(jobs: list[Job], deadline: float) -> list[bool]:
    """What a child answered, until it ended or stood still."""
    child = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    lines: queue.Queue[str] = queue.Queue()

    def read(stream: Iterable[str]) -> None:
        for line in stream:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, args=(child.stdout,), daemon=True).start()
    answers: list[bool] = []
    try:
        child.stdin.write(json.dumps([asdict(job) for job in jobs]))
        child.stdin.close()
        while len(answers) < len(jobs):
            line = lines.get(timeout=max(0.1, min(STALL_S, deadline - time.monotonic())))
            if not line:
                break
            if line.startswith("answer "):
                answers.append(line.split()[1] == "True")
    except (queue.Empty, BrokenPipeError):
        pass
    child.kill()
    return answers


def main() -> None:
    """A child: jobs on stdin, an answer a line."""
    for job in json.load(sys.stdin):
        facts = Job(**{**job, "tile": Tile(**job["tile"])})
        try:
            right = tried(facts)
        except Exception as error:
            if "CUDA error" in str(error):
                raise  # nothing works in this process any more
            print(f"{facts.tile}: {error}", file=sys.stderr)
            right = False
        print(f"answer {right}", flush=True)


if __name__ == "__main__":
    main()
