"""Does anything grow? Mixed requests for a long time at the highest load that the queue takes, everything counted.

    python bench/soak.py --minutes 30 [--model DIR] [--tp 1] [--streams 48] [--seed 1]

Starts a scheduler and workers, keeps `--streams` requests in flight, compares every answer with the first one to the
same request, and reads memory, threads and file descriptors of every process, and the blocks of the pool. The base line
is read after two minutes (or a fifth of the run), when caches and pools have filled; the end is read when all is idle.

The last line is `minutes=M requests=R tokens=T differing=0 failed=0 leaks=0`; the exit code is 0 only then.
"""

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from bench.chaos import Deployment, settle, told
from bench.fuzz_rpc import Watched, wait
from bench.traffic import mixed_requests
from client import Lockstep, LockstepError

KINDS = 64  # different requests, asked over and over
GROWTH = 1.10  # of resident memory between base line and end
SLACK_MIB = 24


class Load(threading.Thread):
    """One stream after the other."""

    shared = threading.Lock()
    expected: dict[int, object] = {}  # noqa: RUF012  one for all threads, on purpose
    requests = tokens = differing = failed = 0

    def __init__(self, client: Lockstep, kinds: Sequence, seed: int, until: float) -> None:  # type: ignore[type-arg]
        super().__init__(daemon=True)
        self._client, self._kinds, self._until = client, kinds, until
        self._draw = random.Random(seed)

    def run(self) -> None:
        while time.monotonic() < self._until:
            which = self._draw.randrange(len(self._kinds))
            try:
                answer = self._client.complete(self._kinds[which])
            except LockstepError as error:
                with self.shared:
                    Load.failed += 1
                print(f"failed: {error!r}", flush=True)
                continue
            with self.shared:
                Load.requests += 1
                Load.tokens += answer.usage.completion_tokens
                Load.differing += self.expected.setdefault(which, told(answer)) != told(answer)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model", type=Path, help="default: a tiny random model")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="lockstep-soak-") as folder:
        model = options.model
        if model is None:
            from tests.tiny_models import make_tiny

            model = make_tiny(Path(folder) / "tiny")
        deployment = Deployment(model, options.tp, Path(folder) / "log")
        try:
            return run(deployment, options)
        finally:
            deployment.close()


def run(deployment: Deployment, options: argparse.Namespace) -> int:
    client = Lockstep(deployment.direct)

    def serves() -> bool:
        try:
            return client.stats().state == "serving"
        except LockstepError:
            return False

    wait(serves, 120, "the services did not serve")
    watched = Watched(deployment.keeper.children)
    kinds = mixed_requests(options.seed, KINDS)
    started = time.monotonic()
    seconds = options.minutes * 60
    threads = [Load(client, kinds, options.seed * 1000 + i, started + seconds) for i in range(options.streams)]
    for thread in threads:
        thread.start()
    warm = min(120.0, seconds / 5)
    base: dict[str, tuple[int, int, int]] = {}
    while (now := time.monotonic() - started) < seconds:
        time.sleep(min(30.0, warm, max(0.1, seconds - now)))
        held = watched.held()
        if not base and time.monotonic() - started >= warm:
            base = held
        print(
            f"{(time.monotonic() - started) / 60:.1f} min: {Load.requests} requests, {Load.tokens} tokens, {held}",
            flush=True,
        )
    for thread in threads:
        thread.join(120)
    left = settle(client)
    end = watched.held()
    grown = [f"{left}"] if left else []
    for name, (threads_, fds, mib) in end.items():
        before = base[name]
        print(f"{name}: threads, descriptors, MiB {before} -> {(threads_, fds, mib)}")
        if threads_ > before[0] + 4 or fds > before[1] + 8 or mib > before[2] * GROWTH + SLACK_MIB:
            grown.append(name)
    crashes = watched.crashes()
    client.close()
    print(f"tokens/s={Load.tokens / seconds:.0f} crashes={crashes} grown={grown}")
    print(
        f"minutes={options.minutes:g} requests={Load.requests} tokens={Load.tokens} differing={Load.differing} "
        f"failed={Load.failed} leaks={len(grown)}"
    )
    return 1 if crashes or grown or Load.differing or Load.failed or not Load.requests else 0


if __name__ == "__main__":
    raise SystemExit(main())
