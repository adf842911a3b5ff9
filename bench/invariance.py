"""Same request, same bits: a fuzzer over the real services.

    python bench/invariance.py --seconds 60 --seed 1 [--model DIR] [--device cuda [--tp 2 4]] [--out FILE]
    python bench/invariance.py --replay FILE

Campaign after campaign: a model and a dtype are drawn, requests of every kind are run alone on the plainest deployment,
then in crowds, at random moments, on deployments drawn at random; every token, logprob, alternative, prompt score and
requested row of logits is compared as bits. An axis counts as tried when positions were compared away from its plain
value and what it stands for has really happened (a pool has preempted, a prefix was found).

The last line is `positions=P differing=D axes=A/A`. Exit code 0: D = 0, P >= 1000 sampled positions, every axis tried.
At a difference a reproducer is written (--out), as small as it got, and the run goes on.
"""

import argparse
import copy
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.crowd.answers import Answer, describe, differing
from bench.crowd.deployments import CUDA_AXES, OPERATOR_AXES, Deployment, draw
from bench.crowd.driving import Arrival, Driver, draw_crowd
from bench.crowd.embedded import EmbeddedDriver
from bench.crowd.reproducing import Reproducer, shrink
from bench.crowd.requests import Limits, RequestSource
from protos import generation_pb2 as pb
from tests.cluster import Cluster

LEAST_POSITIONS = 1000
CROWDS = (2, 4, 8, 32, 128)  # requests; the solo run is beside 1, 3, 7, 31 and 127 others
DTYPES = ("float32", "bfloat16")
# Tiny models: family -> (overrides, shard counts that its shapes allow).
TINY: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "llama": ({"vocab_size": 2500}, (2, 4)),
    "qwen3": ({"num_key_value_heads": 8, "intermediate_size": 256}, (2, 4, 8)),
    "mistral": ({"num_hidden_layers": 3, "sliding_window": 100}, (2, 4)),
    "qwen2": ({}, (2, 4)),
    "olmoe": ({}, (2, 4)),
    "qwen3_moe": ({}, (2, 4)),
    "mixtral": ({}, (2, 4)),
}
# What a GPU's kernels take: bfloat16, heads of 64 or 128, widths of whole tiles.
CUDA_TINY: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 2500, "hidden_size": 512, "intermediate_size": 768},
    "qwen3": {"hidden_size": 1024, "intermediate_size": 1024, "head_dim": 128},  # wide enough to be normed in products
    "mistral": {"hidden_size": 512, "intermediate_size": 768, "head_dim": 64, "sliding_window": 100},
    "qwen2": {"hidden_size": 512, "intermediate_size": 768},
}


class Tally:
    """What has been compared so far, and on which axes."""

    def __init__(self, axes: Sequence[str]) -> None:
        self.axes = tuple(axes)
        self.positions = 0
        self.differing = 0
        self.requests = 0
        self.tried: Counter[str] = Counter()
        self.seen: dict[str, set[str]] = {"dtype": set(), "family": set()}

    @property
    def missing(self) -> set[str]:
        return {axis for axis in self.axes if not self.tried[axis]}

    def count(self, new: int, axes: Sequence[str], positions: int) -> None:
        """`new` positions were compared; `positions` (those and perhaps others) were so on these axes."""
        self.positions += new
        for axis in axes:
            if axis in self.axes:
                self.tried[axis] += positions

    def saw(self, axis: str, value: str, positions: int) -> None:
        """Axes without a plain value: tried when two values have been."""
        if positions:
            self.seen[axis].add(value)
            if len(self.seen[axis]) > 1 and axis in self.axes:
                self.tried[axis] += positions

    def line(self) -> str:
        return (
            f"positions={self.positions} differing={self.differing} "
            f"axes={len(self.axes) - len(self.missing)}/{len(self.axes)}"
        )

    @property
    def passed(self) -> bool:
        return self.differing == 0 and self.positions >= LEAST_POSITIONS and not self.missing


class Campaign:
    """One model in one dtype: what its requests were told alone, and the crowds that are held against it."""

    def __init__(self, model: Path, origin: dict[str, Any], plain: Deployment, max_len: int, seed: int) -> None:
        self.model, self.origin, self.max_len = model, origin, max_len
        self.plain = plain
        self.rng = random.Random(seed)
        config = json.loads((model / "config.json").read_text())
        self._source = RequestSource(seed, Limits(config["vocab_size"], max_len))
        self.requests: list[pb.GenerateRequest] = []
        self.alone: dict[str, Answer] = {}

    def run_alone(self, seconds: float, least: int) -> None:
        """At least `least` requests, then as many as the time allows."""
        with self.plain.start(self.model, self.max_len) as cluster:
            driver = Driver(cluster.address)
            end = time.monotonic() + seconds
            while len(self.requests) < least or time.monotonic() < end:
                request = self._source.draw()
                answer = driver.alone(request)
                assert answer.ended and not answer.refusal, f"{request}{answer.refusal}\n{cluster.text}"
                self.requests.append(request)
                self.alone[request.request_id] = answer
            driver.close()

    def run_crowds(self, deployment: Deployment, seconds: float, tally: Tally, out: Path) -> None:
        with deployment.start(self.model, self.max_len) as cluster:
            driver = cluster if isinstance(cluster, EmbeddedDriver) else Driver(cluster.address)
            began = time.monotonic()
            end = began + seconds
            before = tally.positions
            first = True
            while first or time.monotonic() < end:
                # The first crowd of a deployment is a large one, so that pools fill up.
                size = 48 if first else self.rng.choice(CROWDS)
                killer = None
                if deployment.deaths and first and isinstance(cluster, Cluster):
                    killer = self._kill_later(cluster, deployment.tp)
                self._run_crowd(driver, deployment, size, tally, out)
                if killer is not None:
                    killer.join()
                first = False
            found = tally.positions - before
            tally.count(0, self._axes(deployment, driver.stats()), found)
            for axis in ("dtype", "family"):
                tally.saw(axis, getattr(deployment, axis), found)
            driver.close()
            print(f"{deployment}: {found / (time.monotonic() - began):.0f} positions/s; {tally.line()}", flush=True)

    def _kill_later(self, cluster: Cluster, tp: int) -> threading.Timer:
        """SIGKILL for some rank's worker while the crowd is at work."""
        rank = self.rng.randrange(tp)
        killer = threading.Timer(self.rng.uniform(0.3, 1.5), lambda: os.kill(cluster.worker_pid(rank), signal.SIGKILL))
        killer.start()
        return killer

    def _axes(self, deployment: Deployment, stats: dict[str, float]) -> list[str]:
        """Operator's axes that this deployment has really tried."""
        moved = [axis for axis in (*OPERATOR_AXES, "graphs") if getattr(deployment, axis) != getattr(self.plain, axis)]
        evidence = {
            "blocks": stats.get("preemptions_total", 0),
            "prefix_cache": stats.get("prefix_cache_hits_total", 0),
        }
        return [axis for axis in moved if evidence.get(axis, 1)]

    def _run_crowd(
        self, driver: Driver | EmbeddedDriver, deployment: Deployment, size: int, tally: Tally, out: Path
    ) -> None:
        arrivals = draw_crowd(self.rng, self._sample(size))
        answers = driver.crowd(arrivals)
        compared = sum(self._expected(name).positions for name in answers)
        tally.count(compared, ["settings", "crowd", "order"], compared)
        tally.requests += len(answers)
        wrong = {name: differing(self._expected(name), answer) for name, answer in answers.items()}
        tally.differing += sum(wrong.values())
        for name, count in wrong.items():
            if count:
                print(
                    f"DIFFERS {deployment}: request {name}: {describe(self._expected(name), answers[name])}", flush=True
                )
        worst = max(wrong, key=lambda name: wrong[name], default=None)  # what differs most differs most surely again
        if worst is not None and wrong[worst] and not out.exists():
            self._reproduce(driver, deployment, arrivals, worst, answers[worst], out)

    def _sample(self, size: int) -> list[pb.GenerateRequest]:
        """Some of the requests, some of them more than once: `r7` may come as r7#0 and as r7#1."""
        chosen = [copy.deepcopy(self.rng.choice(self.requests)) for _ in range(size)]
        for number, request in enumerate(chosen):
            request.request_id += f"#{number}"
        return chosen

    def _expected(self, name: str) -> Answer:
        return self.alone[name.partition("#")[0]]

    def _reproduce(
        self,
        driver: Driver | EmbeddedDriver,
        deployment: Deployment,
        arrivals: list[Arrival],
        name: str,
        answer: Answer,
        out: Path,
    ) -> None:
        def differs(trial: Sequence[Arrival]) -> bool:
            got = driver.crowd(trial).get(name)
            return got is not None and differing(self._expected(name), got) > 0

        smallest = tuple(shrink(arrivals, name, differs))
        what = describe(self._expected(name), answer)
        Reproducer(self.origin, self.max_len, deployment, smallest, name, what).write(out)
        print(f"reproducer: {out} ({len(smallest)} of {len(arrivals)} requests)", flush=True)


def make_model(origin: dict[str, Any], scratch: Path) -> Path:
    """The snapshot that `origin` names; tiny ones are made."""
    if "folder" in origin:
        return Path(origin["folder"])
    from tests.tiny_models import make_tiny

    folder = scratch / origin["family"]
    return folder if folder.exists() else make_tiny(folder, origin["family"], **origin["overrides"])


def shard_counts(folder: Path) -> tuple[int, ...]:
    """Shard counts above 1, up to 4, that a model's heads allow."""
    config = json.loads((folder / "config.json").read_text())
    kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    return tuple(tp for tp in (2, 3, 4) if kv_heads % tp == 0 and config["num_attention_heads"] % tp == 0)


def fuzz(options: argparse.Namespace, scratch: Path) -> int:
    rng = random.Random(options.seed)
    on_gpu = options.device != "cpu"
    axes = ["settings", "crowd", "order", *(CUDA_AXES if on_gpu else (*OPERATOR_AXES, "dtype"))]
    asked = tuple(options.tp)
    if on_gpu and asked:  # one process has no ranks
        axes[axes.index("place")] = "tp"
    if options.model:
        tps = asked if on_gpu else shard_counts(options.model)
        origins = [({"folder": str(options.model.resolve())}, options.model.name, tps)]
    elif on_gpu:
        origins = [({"family": f, "overrides": o}, f, asked) for f, o in CUDA_TINY.items()]
        axes.append("family")
    else:
        origins = [({"family": f, "overrides": o}, f, tps) for f, (o, tps) in TINY.items()]
        axes.append("family")
    if "tp" in axes and not all(tps for _, _, tps in origins):
        axes.remove("tp")
    tally = Tally(axes)
    end = time.monotonic() + options.seconds
    slice_s = min(240.0, options.seconds / 2)
    rng.shuffle(origins)
    pairs = alternate(origins, ("bfloat16", "bfloat16") if on_gpu else DTYPES)
    number = 0
    while number < 2 or time.monotonic() < end - 10:
        (origin, name, tps), dtype = pairs[number % len(pairs)]
        number += 1
        stop = min(end, time.monotonic() + slice_s)
        plain = Deployment(
            name, dtype, device=options.device, tp_invariant=on_gpu and bool(asked), gpus=gpus() if asked else 1
        )
        campaign = Campaign(make_model(origin, scratch), origin, plain, options.max_len, rng.randrange(1 << 30))
        campaign.run_alone(slice_s * 0.15, least=32)
        print(f"{campaign.plain}: {len(campaign.requests)} requests alone", flush=True)
        first = True
        while first or time.monotonic() < stop - 8:
            first = False
            deployment = draw(rng, campaign.plain, tps, options.max_len, tally.missing)
            campaign.run_crowds(deployment, max(2.0, slice_s * 0.12), tally, options.out)
    if tally.missing:
        print("not tried: " + " ".join(sorted(tally.missing)))
    print(tally.line())
    return 0 if tally.passed else 1


def gpus() -> int:
    """How many there are, asked in another process: this one shall hold none."""
    asked = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)


def alternate(origins: list[Any], dtypes: tuple[str, str]) -> list[tuple[Any, str]]:
    """Every model in every dtype, so that neighbours differ in both where they can: a short run has two of each."""
    turned = origins[1:] + origins[:1]
    both = [((one, dtypes[0]), (other, dtypes[1])) for one, other in zip(origins, turned)]
    return [pair for neighbours in both for pair in neighbours]


def replay(path: Path, scratch: Path) -> int:
    case = Reproducer.read(path)
    model = make_model(case.model, scratch)
    drawn = case.deployment
    plain = Deployment(drawn.family, drawn.dtype, device=drawn.device, tp_invariant=drawn.tp_invariant, gpus=drawn.gpus)
    request = next(a.request for a in case.arrivals if a.request.request_id == case.suspect)
    with plain.start(model, case.max_len) as cluster:
        alone = Driver(cluster.address).alone(request)
    wrong = 0
    with case.deployment.start(model, case.max_len) as cluster:
        driver = cluster if isinstance(cluster, EmbeddedDriver) else Driver(cluster.address)
        for _ in range(5):
            answer = driver.crowd(case.arrivals)[case.suspect]
            wrong += differing(alone, answer)
            print(f"{case.deployment}: {describe(alone, answer)}")
    print(f"positions={alone.positions * 5} differing={wrong}")
    return 0 if wrong == 0 else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="a snapshot; default: tiny models of several families"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--tp",
        type=int,
        nargs="*",
        default=[],
        metavar="N",
        help="on cuda: shard counts, with leaves; GPUs may be shared",
    )
    parser.add_argument("--max-len", type=int, metavar="N", help="prompt and output of one choice (400; on cuda 1200)")
    parser.add_argument("--out", type=Path, default=Path("invariance-reproducer.json"), metavar="FILE")
    parser.add_argument("--replay", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    options.max_len = options.max_len or (400 if options.device == "cpu" else 1200)
    options.out.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-invariance-") as scratch:
        if options.replay:
            return replay(options.replay, Path(scratch))
        return fuzz(options, Path(scratch))


if __name__ == "__main__":
    raise SystemExit(main())
