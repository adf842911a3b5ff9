"""Does anything grow? Mixed requests for a long time at the highest load that lasts, everything counted.

    python bench/soak.py --minutes 30 [--model DIR] [--tp 1] [--streams 48] [--seed 1] [--json FILE]

Starts a scheduler and workers, keeps `--streams` requests in flight, compares every answer with the first one to the
same request, and reads memory, threads and file descriptors of every process, and the blocks of the pool. Without
`--streams` it first finds the load: twice as many until the tokens a second no longer grow by 5 %. The base line is
read after two minutes (or a fifth of the run), when caches and pools have filled; the end when all is idle.

The last line is `minutes=M requests=R tokens=T differing=0 failed=0 leaks=0 memory=ok threads=ok descriptors=ok
blocks=ok verdict=ok`; the exit code is 0 only then. `--json` has the samples, too.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from bench.chaos import Deployment, settle, told
from bench.fuzz_rpc import Watched, wait
from bench.traffic import mixed_requests
from client import Lockstep, LockstepError
from protos import generation_pb2 as pb

KINDS = 64  # different requests, asked over and over
GROWTH = 1.10  # of resident memory between base line and end
SLACK_MIB = 24
SLACK_THREADS, SLACK_DESCRIPTORS = 4, 8
FIRST_STREAMS, MAX_STREAMS = 8, 256
PROBE_S = 8.0  # of each number of streams that is tried
GAIN = 1.05  # in tokens a second, that twice as many streams must bring
SAMPLE_S = 30.0

Held = dict[str, tuple[int, int, int]]  # process -> threads, file descriptors, resident MiB


class Load:
    """`streams` threads, each asking one request after the other until `until`."""

    def __init__(self, client: Lockstep, kinds: Sequence[pb.GenerateRequest], seed: int) -> None:
        self._client, self._kinds, self._seed = client, kinds, seed
        self._lock = threading.Lock()
        self._expected: dict[int, object] = {}
        self._threads: list[threading.Thread] = []
        self.requests = self.tokens = self.differing = self.failed = 0

    def start(self, streams: int, until: float) -> None:
        self._seed += 1
        draws = [random.Random(self._seed * 1000 + i) for i in range(streams)]
        self._threads = [threading.Thread(target=self._run, args=(draw, until), daemon=True) for draw in draws]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(120)

    def _run(self, draw: random.Random, until: float) -> None:
        while time.monotonic() < until:
            which = draw.randrange(len(self._kinds))
            try:
                answer = self._client.complete(self._kinds[which])
            except LockstepError as error:
                with self._lock:
                    self.failed += 1
                print(f"failed: {error!r}", flush=True)
                continue
            with self._lock:
                self.requests += 1
                self.tokens += answer.usage.completion_tokens
                self.differing += self._expected.setdefault(which, told(answer)) != told(answer)


def highest_load(load: Load) -> int:
    """The number of streams beyond which more bring nothing; every answer counts as in the run itself."""
    streams, best = FIRST_STREAMS, 0.0
    while True:
        before, started = load.tokens, time.monotonic()
        load.start(streams, started + PROBE_S)
        load.join()
        rate = (load.tokens - before) / (time.monotonic() - started)
        print(f"{streams} streams: {rate:.0f} tokens/s", flush=True)
        if rate < best * GAIN or streams == MAX_STREAMS:
            return streams // 2 if rate < best else streams
        streams, best = 2 * streams, rate


def growth(base: Held, end: Held) -> dict[str, list[str]]:
    """Processes that have grown between the base line and the end, by what grew."""
    grown: dict[str, list[str]] = {"memory": [], "threads": [], "descriptors": []}
    for name, (threads, descriptors, mib) in end.items():
        before = base[name]
        if threads > before[0] + SLACK_THREADS:
            grown["threads"].append(name)
        if descriptors > before[1] + SLACK_DESCRIPTORS:
            grown["descriptors"].append(name)
        if mib > before[2] * GROWTH + SLACK_MIB:
            grown["memory"].append(name)
    return grown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model", type=Path, help="default: a tiny random model")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--streams", type=int, default=0, help="default: the highest number that brings anything")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="lockstep-soak-") as folder:
        model = options.model
        if model is None:
            from tests.tiny_models import make_tiny

            model = make_tiny(Path(folder) / "tiny")
        deployment = Deployment(model, options.tp, Path(folder) / "log")
        try:
            result = run(deployment, options)
        finally:
            deployment.close()
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["verdict"] == "ok" else 1


def run(deployment: Deployment, options: argparse.Namespace) -> dict[str, Any]:
    client = Lockstep(deployment.direct)

    def serves() -> bool:
        try:
            return client.stats().state == "serving"
        except LockstepError:
            return False

    wait(serves, 120, "the services did not serve")
    watched = Watched(deployment.keeper.children)
    load = Load(client, mixed_requests(options.seed, KINDS), options.seed)
    streams = options.streams or highest_load(load)
    seconds, tokens_before, machine_load = options.minutes * 60, load.tokens, os.getloadavg()[0]
    started = time.monotonic()
    load.start(streams, started + seconds)
    warm = min(120.0, seconds / 5)
    base: Held = {}
    samples = []
    while (now := time.monotonic() - started) < seconds:
        time.sleep(min(SAMPLE_S, warm, max(0.1, seconds - now)))
        held, now = watched.held(), time.monotonic() - started
        if not base and now >= warm:
            base = held
        samples.append({"minute": round(now / 60, 2), "requests": load.requests, "tokens": load.tokens, "held": held})
        print(f"{now / 60:.1f} min: {load.requests} requests, {load.tokens} tokens, {held}", flush=True)
    load.join()
    rate = (load.tokens - tokens_before) / (time.monotonic() - started)
    left = settle(client)
    crashes = watched.crashes()
    end = watched.held() if not crashes else base
    for name, held_now in end.items():
        print(f"{name}: threads, descriptors, MiB {base[name]} -> {held_now}")
    grown = {**growth(base, end), "blocks": [left] if left else []}
    client.close()
    leaks = sum(map(len, grown.values()))
    bad = crashes or leaks or load.differing or load.failed or not load.requests
    verdict = "failed" if bad else "ok"
    words = " ".join(f"{what}={'ok' if not names else 'GROWN'}" for what, names in grown.items())
    print(f"streams={streams} tokens/s={rate:.0f} crashes={crashes} grown={grown}")
    print(
        f"minutes={options.minutes:g} requests={load.requests} tokens={load.tokens} differing={load.differing} "
        f"failed={load.failed} leaks={leaks} {words} verdict={verdict}"
    )
    return {
        "minutes": options.minutes,
        "streams": streams,
        "tp": options.tp,
        "machine_load": machine_load,
        "tokens_per_s": rate,
        "requests": load.requests,
        "tokens": load.tokens,
        "differing": load.differing,
        "failed": load.failed,
        "crashes": crashes,
        "base": base,
        "end": end,
        "grown": grown,
        "samples": samples,
        "verdict": verdict,
    }


if __name__ == "__main__":
    raise SystemExit(main())
