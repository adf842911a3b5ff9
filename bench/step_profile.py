"""Where the time of a step goes: the CUDA runner in this process, without services, under the profiler.

    python bench/step_profile.py --model bench/configs/qwen3-8b --decode 1x512 64x4096 256x900 --prefill 8192

ROWSxCONTEXT decodes as a steady pipeline of depth 2; a prefill computes one prompt of that many tokens. Prints the step
time on the wall, the share of it in which the device ran a kernel, kernels a step, and time by kernel.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from protos.step import GroupConfig, Row, RowSampling, StepBatch, int32s  # noqa: E402
from worker_svc.assembly import _load_runner  # noqa: E402
from worker_svc.config import WorkerConfig  # noqa: E402
from worker_svc.parallel.group import SingleGroup  # noqa: E402

BLOCK = 64


class Steps:
    """Batches for one runner, in order."""

    def __init__(self, runner: Any, config: GroupConfig) -> None:
        self.runner, self.config = runner, config
        self.seq, self.free = 0, 0

    def run(self, batch_args: dict[str, Any], count: int, depth: int = 2) -> float:
        """The first batch carries the arguments, the others nothing; seconds a step of all but the first."""
        pending = [self._launch(**batch_args)]
        pending.pop().result()
        start = time.perf_counter()
        for _ in range(count):
            pending.append(self._launch())
            if len(pending) >= depth:
                pending.pop(0).result()
        for one in pending:
            one.result()
        return (time.perf_counter() - start) / max(1, count)

    def _launch(self, **args: Any) -> Any:
        batch = StepBatch(self.config.epoch, self.seq, **args)
        self.seq += 1
        return self.runner.launch(batch)

    def rows(self, count: int, tokens: int, computed: int) -> tuple[Row, ...]:
        """Rows whose blocks are their own where the pool is large enough, else shared."""
        per_row = -(-(tokens + 400) // BLOCK)
        ids = np.random.default_rng(0).integers(1000, 40000, tokens).astype(np.int32)
        sampling = RowSampling(temperature=0.6)
        pool = np.arange(count * per_row, dtype=np.int32) % self.blocks
        return tuple(
            Row(i, "", ids, tokens, computed, pool[i * per_row : (i + 1) * per_row], i, sampling=sampling)
            for i in range(count)
        )

    blocks = 1


def profiled(run: Any) -> tuple[float, list[tuple[str, float, float, int]]]:
    """(seconds a step, kernels as (name, start us, duration us))."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return [
        (e.name, e.time_range.start, e.time_range.elapsed_us())
        for e in profile.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    ]


def report(name: str, steps: int, seconds: float, kernels: list[tuple[str, float, float]], out: dict[str, Any]) -> None:
    kernels = sorted(kernels, key=lambda k: k[1])
    total, count = defaultdict(float), defaultdict(int)
    busy, end, begin = 0.0, 0.0, kernels[0][1]
    for kernel, start, duration in kernels:
        total[kernel] += duration
        count[kernel] += 1
        busy += max(0.0, start + duration - max(end, start))
        end = max(end, start + duration)
    lines = [
        f"{t / steps:9.1f} us {count[k] / steps:6.1f} x {t / count[k]:8.2f} us  {k[:70]}"
        for k, t in sorted(total.items(), key=lambda kv: -kv[1])[:14]
    ]
    share, each = 100 * busy / (end - begin), len(kernels) / steps
    print(f"== {name}: {seconds * 1e3:.3f} ms a step, busy {share:.1f} %, {each:.0f} kernels a step")
    print("\n".join(lines), flush=True)
    out[name] = {
        "step_ms": round(seconds * 1e3, 4), "busy_percent": round(100 * busy / (end - begin), 2),
        "kernels": round(len(kernels) / steps, 1),
        "us_by_kernel": {k: round(t / steps, 2) for k, t in sorted(total.items(), key=lambda kv: -kv[1])[:14]},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--numerics", default="invariant")
    parser.add_argument("--decode", nargs="*", default=[])
    parser.add_argument("--prefill", nargs="*", type=int, default=[])
    parser.add_argument("--no-profile", dest="profile", action="store_false")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    start = time.perf_counter()
    weights = None if list(options.model.glob("*.safetensors")) else 0
    runner = _load_runner(WorkerConfig(options.model, device="cuda", numerics=options.numerics, random_weights=weights))
    config = GroupConfig(1, BLOCK, 0, 256, 8192, 17408, pipeline_depth=2)
    loaded = time.perf_counter()
    Steps.blocks = runner.join(config, SingleGroup())
    print(f"load {loaded - start:.1f} s, join {time.perf_counter() - loaded:.1f} s, {Steps.blocks} blocks", flush=True)
    out: dict[str, Any] = {}
    live: list[int] = []
    steps = Steps(runner, config)
    for case in options.decode:
        rows, context = map(int, case.split("x"))
        introduced = steps.rows(rows, context, context - 1)
        seconds = steps.run({"retired": int32s(*live), "rows": introduced}, 40)
        live = [row.slot for row in introduced]
        kernels = profiled(lambda: steps.run({}, 9)) if options.profile else []
        if kernels:
            report(f"decode {case}", 10, seconds, kernels, out)
        else:
            print(f"== decode {case}: {seconds * 1e3:.3f} ms a step", flush=True)
    for tokens in options.prefill:

        def prefill(tokens: int = tokens) -> float:
            begin = time.perf_counter()
            rows = steps.rows(1, tokens, 0)
            pending = []
            for first in range(0, tokens, config.max_batch_tokens):
                new = min(config.max_batch_tokens, tokens - first)
                args = {"retired": int32s(*live), "rows": rows} if first == 0 else {}
                pending.append(steps._launch(**args, slots=int32s(0), num_new=int32s(new)))
                live[:] = [0]
            for one in pending:
                one.result()
            return time.perf_counter() - begin

        prefill()
        seconds = min(prefill() for _ in range(3))
        kernels = profiled(prefill)
        report(f"prefill {tokens} ({tokens / seconds:,.0f} tok/s)", 1, seconds, kernels, out)
    if options.out:
        options.out.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
