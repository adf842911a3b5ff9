"""Milliseconds of one decode step's forward pass and head on CPU, without sampling, scheduler or wire.

    python bench/forward_cpu.py [--model DIR] [--dtype bfloat16] [--context 192] [--batches 1,4,16] [--transformers]
                                [--cpu-time]

Prints one line a batch size: invariant, fast and, when asked, transformers on the same machine, best and median of the
steps. Settings alternate within a run, so that a noisy neighbour hits them alike. --cpu-time counts the process's CPU
seconds instead of the wall's: with --threads 1 it says what a step costs on a machine that others use as well.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the services set it

import numpy as np
import torch

from worker_svc.kv_cache import KVCache
from worker_svc.models import load_model
from worker_svc.models.load import Mode
from worker_svc.parallel.group import SingleGroup
from worker_svc.slots import StepPlan
from worker_svc.step_inputs import build

BLOCK = 16


def plan_step(batch: int, first: int, num_new: int, num_blocks: int) -> StepPlan:
    """Every row computes `num_new` tokens from position `first`."""
    rng = np.random.default_rng(first)
    tables = np.arange(batch * num_blocks, dtype=np.int32).reshape(num_blocks, batch).T
    return StepPlan(
        slots=np.arange(batch, dtype=np.int32),
        num_new=np.full(batch, num_new, np.int32),
        first_position=np.full(batch, first, np.int32),
        num_cached=np.zeros(batch, np.int32),
        samples=np.ones(batch, bool),
        token_ids=rng.integers(1000, 40000, batch * num_new).astype(np.int32),
        block_tables=np.ascontiguousarray(tables),
        query_starts=np.arange(batch + 1, dtype=np.int32) * num_new,
        rows=(),
    )


def ours(model_dir: str, dtype: str, numerics: Mode, batch: int, context: int, steps: int) -> Callable[[int], None]:
    model = load_model(model_dir, dtype=dtype, numerics=numerics)
    blocks = -(-(context + steps + 1) // BLOCK)
    cache = KVCache(model.spec, batch * blocks, BLOCK, dtype=model.ops.dtype)
    group = SingleGroup()
    model.forward(build(plan_step(batch, 0, context, blocks)), cache, group)

    def step(index: int) -> None:
        inputs = build(plan_step(batch, context + index, 1, blocks))
        model.logits(model.forward(inputs, cache, group), group)

    return step


def transformers_step(model_dir: str, dtype: str, batch: int, context: int) -> Callable[[int], None]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()
    with torch.inference_mode():
        past = model(torch.randint(1000, 40000, (batch, context)), use_cache=True).past_key_values

    def step(index: int) -> None:
        with torch.inference_mode():
            model(torch.randint(1000, 40000, (batch, 1)), past_key_values=past, use_cache=True)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(Path("~/.cache/lockstep/SmolLM2-135M-Instruct").expanduser()))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.cpu_time else time.perf_counter
    for batch in map(int, args.batches.split(",")):
        modes: tuple[Mode, ...] = ("invariant", "fast")
        contenders = {mode: ours(args.model, args.dtype, mode, batch, args.context, args.steps) for mode in modes}
        if args.transformers:
            contenders["transformers"] = transformers_step(args.model, args.dtype, batch, args.context)
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for index in range(args.steps):
            for name, step in contenders.items():
                start = clock()
                step(index)
                times[name].append(1e3 * (clock() - start))
        line = [f"{name} {min(t):.1f}/{statistics.median(t):.1f} ms" for name, t in times.items()]
        print(f"{args.dtype} batch {batch}: " + ", ".join(line), flush=True)


if __name__ == "__main__":
    main()
