"""Nothing is lost: rounds of mixed streams over the real services, one random fault in each, every bit compared.

    python bench/chaos.py --rounds 200 --seed 1 [--model DIR] [--tp 2] [--kinds worker-kill,link-cut,...]

Scheduler, engine and workers are processes; between scheduler and workers, and between clients and scheduler, lie TCP
proxies of ours. Each round asks 16 streams (greedy, seeded, penalties, stop strings, logprobs, n=4, prompt scores)
through the client library, which takes lost streams up again by itself, and injects one fault when a random number of
tokens has arrived. Whatever happened, every answer must equal the one of an undisturbed run.

The last line is `rounds=N faults=F recovered=R lost=0 differing=0`: lost counts streams without a whole answer,
differing those with another one. The exit code is 0 only if every kind of fault happened and all recovered.
"""

import argparse
import os
import random
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # children are executed at once; nothing of gRPC enters them

import grpc

from bench.tcp_proxy import TcpProxy
from bench.traffic import mixed_requests
from client import Completion, Lockstep, LockstepError, RetryPolicy
from protos import generation_pb2 as pb
from protos import generation_pb2_grpc
from protos.worker_link import SECRET_VARIABLE
from scheduler_svc.up import Child, free_port

STREAMS = 16
SETS = 6  # of requests, asked in turns
POOL_BLOCKS = 200  # a crowd that exhausts it is a fault of its own
PATIENCE_S = 90.0


class Keeper:
    """Processes that are restarted when they die or freeze, as docker, Kubernetes or lockstep-up would."""

    def __init__(self, children: Sequence[Child]) -> None:
        self.children = list(children)
        self._stopping = False
        self._thread = threading.Thread(target=self._keep, name="keeper")
        self._thread.start()

    def _keep(self) -> None:
        while not self._stopping:
            for child in self.children:
                if child.process is not None and child.process.poll() is not None:
                    child.reap()
                if child.process is None:
                    child.start()
                for pid in child.frozen():
                    _kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for child in self.children:
            child.signal(signal.SIGKILL)
            if child.process is not None:
                child.reap()

    def stop(self) -> None:
        self._stopping = True
        self._thread.join()


class Deployment:
    """Workers, a scheduler and the proxies between them."""

    def __init__(self, model: Path, tp: int, log: Path) -> None:
        environment = {**os.environ, SECRET_VARIABLE: secrets.token_hex(8)}
        ports = [free_port("127.0.0.1") for _ in range(tp)]
        self.worker_links = [TcpProxy(("127.0.0.1", port)) for port in ports]
        listen = free_port("127.0.0.1")
        self.client_link = TcpProxy(("127.0.0.1", listen))
        self.direct = f"127.0.0.1:{listen}"
        bin_folder = Path(sys.executable).parent
        self.workers = [
            Child(
                f"worker {rank}",
                [
                    *(sys.executable, str(bin_folder / "lockstep-worker"), "--model", str(model), "--threads", "1"),
                    *("--listen", f"127.0.0.1:{port}", "--rank", str(rank), "--tp", str(tp)),
                ],
                environment,
                log=log,
            )
            for rank, port in enumerate(ports)
        ]
        self.scheduler = Child(
            "scheduler",
            [
                *(sys.executable, str(bin_folder / "lockstep-scheduler"), "--listen", self.direct),
                *("--workers", ",".join(link.address for link in self.worker_links)),
                *("--kv-blocks", str(POOL_BLOCKS), "--max-num-seqs", "32", "--max-batch-tokens", "96"),
                *("--step-timeout", "3", "--recovery-timeout", "60"),
            ],
            environment,
            log=log,
        )
        self.keeper = Keeper([*self.workers, self.scheduler])

    def engine_pid(self) -> int:
        """The process below the scheduler."""
        assert self.scheduler.process is not None
        pid = self.scheduler.process.pid
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                return int(child)
        return 0

    def close(self) -> None:
        self.keeper.stop()
        for link in [*self.worker_links, self.client_link]:
            link.close()


def _kill(pid: int, number: int) -> None:
    if pid > 0:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def _pid(child: Child) -> int:
    return child.process.pid if child.process is not None else 0


# Faults: each takes the deployment and the dice, and returns when it has done its deed.
Fault = Callable[[Deployment, random.Random], None]


def _signal_worker(number: int) -> Fault:
    return lambda deployment, draw: _kill(_pid(draw.choice(deployment.workers)), number)


def _signal_scheduler(number: int) -> Fault:
    return lambda deployment, draw: _kill(_pid(deployment.scheduler), number)


def _signal_engine(number: int) -> Fault:
    return lambda deployment, draw: _kill(deployment.engine_pid(), number)


def _on_worker_link(act: Callable[[TcpProxy], None]) -> Fault:
    return lambda deployment, draw: act(draw.choice(deployment.worker_links))


def _on_client_link(act: Callable[[TcpProxy], None]) -> Fault:
    return lambda deployment, draw: act(deployment.client_link)


def _late(link: TcpProxy) -> None:
    link.delay(0.15)
    time.sleep(1.0)
    link.delay(0.0)


def _swallow(link: TcpProxy) -> None:
    link.swallow()
    time.sleep(6.0)  # longer than the step deadline and the pings of the link
    link.swallow(False)


def _disconnect(deployment: Deployment, draw: random.Random) -> None:
    """Clients that ask and go away in the middle, without a word."""
    for request in mixed_requests(draw.randrange(1 << 30), 6):
        with grpc.insecure_channel(deployment.direct) as channel:
            call = generation_pb2_grpc.GenerationStub(channel).Generate(request)  # type: ignore[no-untyped-call]
            time.sleep(draw.random() * 0.1)
            call.cancel()


def _exhaust(deployment: Deployment, draw: random.Random) -> None:
    """Long requests that together need more blocks than there are."""
    channel = grpc.insecure_channel(deployment.direct)
    stub = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
    calls = []
    for _ in range(12):
        request = pb.GenerateRequest()
        request.token_ids.ids.extend(draw.randrange(256) for _ in range(300))
        request.sampling.max_tokens, request.sampling.ignore_eos = 60, True
        calls.append(stub.Generate(request, timeout=PATIENCE_S))
    for call in calls:
        for _ in call:
            pass
    channel.close()


def _read_slowly(deployment: Deployment, draw: random.Random) -> None:
    """A client that takes an answer with many alternatives, one event at a time."""
    request = pb.GenerateRequest()
    request.token_ids.ids.extend([1, 2, 3])
    request.sampling.max_tokens, request.sampling.logprobs, request.sampling.ignore_eos = 200, 20, True
    with grpc.insecure_channel(deployment.direct) as channel:
        call = generation_pb2_grpc.GenerationStub(channel).Generate(request)  # type: ignore[no-untyped-call]
        for _ in range(5):
            next(call)
            time.sleep(0.4)
        call.cancel()


KINDS: dict[str, Fault] = {
    "worker-kill": _signal_worker(signal.SIGKILL),
    "worker-stop": _signal_worker(signal.SIGSTOP),
    "scheduler-kill": _signal_scheduler(signal.SIGKILL),
    "scheduler-stop": _signal_scheduler(signal.SIGSTOP),
    "engine-kill": _signal_engine(signal.SIGKILL),
    "engine-stop": _signal_engine(signal.SIGSTOP),
    "worker-link-cut": _on_worker_link(TcpProxy.cut),
    "worker-link-truncate": _on_worker_link(TcpProxy.truncate),
    "worker-link-late": _on_worker_link(_late),
    "worker-link-swallow": _on_worker_link(_swallow),
    "client-link-cut": _on_client_link(TcpProxy.cut),
    "client-link-truncate": _on_client_link(TcpProxy.truncate),
    "client-link-late": _on_client_link(_late),
    "client-disconnect": _disconnect,
    "pool-exhaustion": _exhaust,
    "slow-reader": _read_slowly,
}


class Round:
    """STREAMS requests at once, through the client library."""

    def __init__(self, client: Lockstep, requests: Sequence[pb.GenerateRequest]) -> None:
        self.answers: list[Completion | LockstepError | None] = [None] * len(requests)
        self._tokens = 0
        self._moved = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, args=(client, i, request), daemon=True)
            for i, request in enumerate(requests)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, client: Lockstep, i: int, request: pb.GenerateRequest) -> None:
        stream = client.stream_request(request)
        try:
            for delta in stream:
                with self._moved:
                    self._tokens += len(delta.token_ids)
                    self._moved.notify_all()
            self.answers[i] = stream.completion
        except LockstepError as error:
            self.answers[i] = error

    def wait_for_tokens(self, count: int) -> None:
        with self._moved:
            self._moved.wait_for(lambda: self._tokens >= count or not self._running(), 30)

    def _running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def join(self) -> list[Completion | LockstepError | None]:
        deadline = time.monotonic() + 2 * PATIENCE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return self.answers


def told(answer: Completion | LockstepError | None) -> Any:
    """Every bit of an answer that a run must not change; None if it is not whole."""
    if not isinstance(answer, Completion) or any(choice.finish is None for choice in answer.choices):
        return None
    usage = answer.usage
    counts = (usage.prompt_tokens, usage.completion_tokens)
    return answer.seed, answer.fingerprint.digest, answer.choices, answer.prompt_logprobs, counts


def settle(client: Lockstep) -> str:
    """What is still held when nobody asks any more; "" for nothing."""
    deadline = time.monotonic() + 30
    values: dict[str, float] = {}
    while time.monotonic() < deadline:
        values = dict(client.stats().values)
        if values.get("requests_live") == 0 and values.get("kv_blocks_held") == 0:
            return ""
        time.sleep(0.05)
    return f"{values.get('requests_live')} requests live, {values.get('kv_blocks_held')} blocks held"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=len(KINDS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, help="default: a tiny random model")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--kinds", default=",".join(KINDS), help="faults to draw from; default: all")
    options = parser.parse_args(arguments)
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as folder:
        model = options.model
        if model is None:
            from tests.tiny_models import make_tiny

            model = make_tiny(Path(folder) / "tiny")
        deployment = Deployment(model, options.tp, Path(folder) / "log")
        try:
            return run(deployment, options.rounds, random.Random(options.seed), kinds)
        finally:
            deployment.close()
            if os.environ.get("CHAOS_LOG"):
                Path(os.environ["CHAOS_LOG"]).write_bytes((Path(folder) / "log").read_bytes())


def run(deployment: Deployment, rounds: int, draw: random.Random, kinds: Sequence[str]) -> int:
    client = Lockstep(deployment.client_link.address, retry=RetryPolicy(patience_s=PATIENCE_S, max_backoff_s=0.5))
    sets = [mixed_requests(draw.randrange(1 << 30), STREAMS) for _ in range(SETS)]
    expected = [[told(answer) for answer in Round(client, requests).join()] for requests in sets]
    assert all(None not in answers for answers in expected), "the undisturbed run was disturbed"
    totals = [sum(len(choice.token_ids) for told_ in answers for choice in told_[2]) for answers in expected]
    deck: list[str] = []
    happened: Counter[str] = Counter()
    recovered = lost = differing = requests = resumed = leaks = 0
    for number in range(rounds):
        deck = deck or draw.sample(list(kinds), len(kinds))
        kind, which = deck.pop(), draw.randrange(SETS)
        started = time.monotonic()
        crowd = Round(client, sets[which])
        crowd.wait_for_tokens(draw.randrange(int(totals[which] * 0.7)))
        KINDS[kind](deployment, draw)
        answers = crowd.join()
        found = [told(answer) for answer in answers]
        gone = sum(one is None for one in found)
        other = sum(one is not None and one != wanted for one, wanted in zip(found, expected[which]))
        held = settle(client)
        happened[kind] += 1
        requests += len(answers)
        lost, differing, leaks = lost + gone, differing + other, leaks + bool(held)
        taken_up = sum(answer.resumed for answer in answers if isinstance(answer, Completion))
        resumed += taken_up
        recovered += not gone and not other and not held
        print(
            f"round {number + 1} {kind}: {time.monotonic() - started:.1f} s, {taken_up} streams taken up again"
            + (f", {gone} LOST: {_reasons(answers)}" if gone else "")
            + (f", {other} DIFFERING: {_differences(found, expected[which])}" if other else "")
            + (f", LEFT: {held}" if held else ""),
            flush=True,
        )
    client.close()
    faults = sum(happened.values())
    print(f"faults by kind: {', '.join(f'{kind} {count}' for kind, count in sorted(happened.items()))}")
    print(f"requests={requests} taken_up_again={resumed} leaks={leaks} kinds={len(happened)}/{len(kinds)}")
    print(f"rounds={rounds} faults={faults} recovered={recovered} lost={lost} differing={differing}")
    return 0 if recovered == rounds and len(happened) == len(set(kinds)) else 1


def _differences(found: Sequence[Any], expected: Sequence[Any]) -> str:
    """In what, of the first few that differ."""
    names = ("seed", "fingerprint", "choices", "prompt_logprobs", "usage")
    told = []
    for i, (one, wanted) in enumerate(zip(found, expected)):
        if one is None or one == wanted:
            continue
        parts = [name for name, a, b in zip(names, one, wanted) if a != b]
        for a, b in zip(one[2], wanted[2]):
            fields = [name for name in a.__slots__ if getattr(a, name) != getattr(b, name)]
            parts += [
                f"{name} of choice {a.index}: {getattr(a, name)!r:.300} != {getattr(b, name)!r:.300}" for name in fields
            ]
        told.append(f"stream {i}: {', '.join(parts)}")
    return " | ".join(told[:3])


def _reasons(answers: Sequence[Completion | LockstepError | None]) -> str:
    return "; ".join(sorted({repr(answer) for answer in answers if not isinstance(answer, Completion)}))[:500]


if __name__ == "__main__":
    raise SystemExit(main())
