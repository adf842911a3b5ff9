"""What numerics `invariant` costs on a CPU against `fast`, through the real services.

    python bench/invariant_cost.py [--json] [--model DIR] [--batches 1,4,8,16,64] [--dtypes float32,bfloat16]

For each dtype both kinds of services run side by side, one idle while the other works, and each batch is timed A B A
(invariant, fast, invariant), so that a machine that gets slower meanwhile shows as a difference between the two A's and
not as a cost. A figure is generated tokens over the wall time from the first request to the last event; prompts are
short, so nearly all of it is decoding at that batch. cost = fast / mean of the A's - 1; the best of --rounds counts.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.crowd.driving import Arrival, Driver
from protos import generation_pb2 as pb
from tests.cluster import Cluster

PROMPT = 16


@dataclass(frozen=True)
class Cost:
    """Tokens a second at one batch: invariant before and after, fast between."""

    dtype: str
    batch: int
    before: float
    fast: float
    after: float

    @property
    def invariant(self) -> float:
        return (self.before + self.after) / 2

    @property
    def cost(self) -> float:
        """What share longer a token takes."""
        return self.fast / self.invariant - 1


def crowd(batch: int, output: int, seed: int, vocab_size: int) -> list[Arrival]:
    """Fresh prompts each time, so that no prefix is found."""
    rng = random.Random(seed)
    arrivals = []
    for number in range(batch):
        sampling = pb.SamplingParams(temperature=0.6, max_tokens=output, ignore_eos=True, seed=number)
        ids = [rng.randrange(vocab_size) for _ in range(PROMPT)]
        request = pb.GenerateRequest(request_id=f"r{number}", token_ids=pb.TokenIds(ids=ids), sampling=sampling)
        arrivals.append(Arrival(request))
    return arrivals


def tokens_per_second(driver: Driver, batch: int, output: int, seed: int) -> float:
    arrivals = crowd(batch, output, seed, driver.info().vocab_size)
    began = time.monotonic()
    answers = driver.crowd(arrivals)
    seconds = time.monotonic() - began
    tokens = sum(answer.positions for answer in answers.values())
    assert tokens == batch * output, [answer.refusal for answer in answers.values() if answer.refusal]
    return tokens / seconds


def measure(model: Path, dtype: str, batches: Sequence[int], output: int, rounds: int, threads: int) -> list[Cost]:
    with ExitStack() as stack:
        drivers = {}
        for numerics in ("invariant", "fast"):
            flags = {"dtype": dtype, "numerics": numerics, "max_num_seqs": max(batches), "kv_blocks": 1024}
            flags |= {"threads": threads} if threads else {"threads": available_cores()}
            cluster = stack.enter_context(Cluster(model, log_level="warning", ready_timeout_s=180, **flags))
            drivers[numerics] = Driver(cluster.address)
            tokens_per_second(drivers[numerics], 2, 4, 0)
        costs = []
        for batch in batches:
            found = []
            for turn in range(rounds):
                runs = [
                    tokens_per_second(drivers[kind], batch, output, turn * 3 + place)
                    for place, kind in enumerate(("invariant", "fast", "invariant"))
                ]
                found.append(Cost(dtype, batch, *runs))
            # The machine is shared: the round that it disturbed least is the one with the closest A's.
            best = min(found, key=lambda cost: abs(cost.before - cost.after) / cost.invariant)
            costs.append(best)
            print(line(best), file=sys.stderr, flush=True)
        return costs


def line(cost: Cost) -> str:
    speeds = f"{cost.before:12.1f} {cost.fast:9.1f} {cost.after:12.1f}"
    return f"{cost.dtype:9} {cost.batch:5} {speeds} {100 * cost.cost:+7.1f} %"


def available_cores() -> int:
    return len(os.sched_getaffinity(0))


def demo_model() -> Path:
    made = subprocess.run([sys.executable, "-m", "worker_svc.loading.demo_model"], capture_output=True, text=True)
    if made.returncode:
        raise SystemExit(made.stderr)
    return Path(made.stdout.strip().splitlines()[-1])


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (entry.partition(":")[2].strip() for entry in lines if entry.startswith("model name")), platform.machine()
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="default: the demo model")
    parser.add_argument("--batches", default="1,4,8,16,64")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="of each worker; default: all cores")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    model = options.model or demo_model()
    batches = [int(batch) for batch in options.batches.split(",")]
    print("dtype     batch  invariant A    fast B  invariant A    cost", file=sys.stderr)
    costs = [
        cost
        for dtype in options.dtypes.split(",")
        for cost in measure(model, dtype, batches, options.output_tokens, options.rounds, options.threads)
    ]
    if options.json:
        print(
            json.dumps(
                {
                    "command": ["python", "bench/invariant_cost.py", *(arguments or sys.argv[1:])],
                    "model": model.name,
                    "cpu": processor(),
                    "cores": available_cores(),
                    "costs": [asdict(cost) | {"cost": cost.cost} for cost in costs],
                },
                indent=1,
            )
        )
    else:
        print("dtype     batch  invariant A    fast B  invariant A    cost")
        print("\n".join(line(cost) for cost in costs))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
