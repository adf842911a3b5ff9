"""Malformed, truncated, oversized and random messages at every RPC of both services, beside a control stream.

    python bench/fuzz_rpc.py --messages 10000 --seed 1 [--model DIR]

Starts a scheduler and a worker (without a secret, so that its handlers are reached) and throws messages at them: random
bytes, valid messages cut short or with bits flipped, messages whose every field is random or extreme, and some above
the limits. Bytes that are no message of the method must be answered INVALID_ARGUMENT and leave no trace in the log.
Meanwhile control requests run and must answer the same bits every time. At the end the same processes must be alive,
with no block held and no thread more than after the first round of messages.

The last line is `messages=N crashes=0 hangs=0 unhandled=0 leaks=0 control=C differing=0`; the exit code is 0 only then.
"""

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
import psutil
from google.protobuf.message import DecodeError, Message

from bench.random_messages import Target, likely_messages, random_bytes, random_message, targets
from bench.traffic import Answer, ask, mixed_requests
from client import Lockstep
from protos import generation_pb2_grpc
from protos import worker_pb2 as inner
from protos.worker_link import EPOCH_KEY, HOST_KEY
from scheduler_svc.up import Child, free_port

HANG_S = 20.0  # without an event or a status
EVENTS = 8  # read of a stream that goes well, then it is cancelled
THREADS = 6  # of attackers
OVERSIZED_BYTES = 70 << 20
UNHANDLED = ("Unexpected <class", "Exception calling", "Exception deserializing", "Exception iterating", "DecodeError")


class Attack:
    """Sends messages and sorts what becomes of them."""

    def __init__(self, scheduler: str, worker: str, likely: Sequence[Message]) -> None:
        self._addresses = {False: scheduler, True: worker}
        self._targets = targets()
        self._likely = list(likely)
        self._lock = threading.Lock()
        self.statuses: Counter[str] = Counter()
        self.hangs: list[str] = []
        self.unhandled: Counter[str] = Counter()
        self.sent = 0
        self.seconds: Counter[str] = Counter()

    def run(self, count: int, seed: int) -> None:
        draw = random.Random(seed)
        channels = {is_inner: self._channel(is_inner) for is_inner in (False, True)}
        for _ in range(count):
            target = draw.choice(self._targets)
            if draw.random() < 0.01:  # a fresh connection now and then
                channels[target.inner].close()
                channels[target.inner] = self._channel(target.inner)
            if draw.random() < 0.004:
                self._take_over(channels[True], draw)
                continue
            oversized = draw.random() < 0.0005
            messages = [
                draw.randbytes(1 << 20) * (OVERSIZED_BYTES >> 20)
                if oversized
                else random_bytes(target, draw, self._likely)
                for _ in range(draw.choice((1, 1, 2, 4)) if target.streams_in else 1)
            ]
            self._one(channels[target.inner], target, messages, draw)
        for channel in channels.values():
            channel.close()

    def _channel(self, is_inner: bool) -> grpc.Channel:
        return grpc.insecure_channel(
            self._addresses[is_inner],
            (
                ("grpc.max_send_message_length", -1),
                ("grpc.max_receive_message_length", -1),
                ("grpc.use_local_subchannel_pool", 1),
            ),
        )

    def _take_over(self, channel: grpc.Channel, draw: random.Random) -> None:
        """Join the worker as a scheduler would, which ends the real one's epoch, and step it with nonsense."""
        describe: Any = channel.unary_unary(
            "/lockstep.v1.Worker/Describe", response_deserializer=inner.Description.FromString
        )
        epoch = describe(b"", timeout=HANG_S).epoch + 1
        joins = [message for message in self._likely if isinstance(message, inner.JoinRequest)]
        join = inner.JoinRequest()
        join.CopyFrom(joins[0])
        join.epoch = epoch
        path = "/lockstep.v1.Worker/Join"
        self._one(channel, Target(path, inner.JoinRequest, False, False, True), [join.SerializeToString()], draw)
        batches = []
        for seq in range(1, draw.randint(2, 5)):
            request = random_message(inner.StepRequest, draw)
            steps = [message for message in self._likely if isinstance(message, inner.StepRequest)]
            if draw.random() < 0.7:
                request.CopyFrom(draw.choice(steps))
            request.batch.epoch, request.batch.seq = epoch, seq
            data = bytearray(request.SerializeToString())
            if draw.random() < 0.5:
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            batches.append(bytes(data))
        path = "/lockstep.v1.Worker/Steps"
        self._one(channel, Target(path, inner.StepRequest, True, True, True), batches, draw, str(epoch))

    def _one(
        self, channel: grpc.Channel, target: Target, messages: list[bytes], draw: random.Random, epoch: str = ""
    ) -> None:
        kind = ("stream" if target.streams_in else "unary") + "_" + ("stream" if target.streams_out else "unary")
        call: Any = getattr(channel, kind)(target.path, request_serializer=None, response_deserializer=None)
        request: Any = iter(messages) if target.streams_in else messages[0]
        metadata = []
        if target.path.endswith("/Steps"):
            metadata = [
                (EPOCH_KEY, epoch or str(draw.choice((0, 1, 2, 3, 10**30, -1)))),
                (HOST_KEY, draw.choice(("", "x", "é".encode().hex()))),
            ]
        status = "OK"
        timeout_s = 0.2 if target.path.endswith("/Watch") else HANG_S  # a watch has no end of its own
        started = time.monotonic()
        try:
            if target.streams_out:
                stream = call(request, timeout=timeout_s, metadata=metadata)
                for _, _event in zip(range(EVENTS), stream):
                    pass
                stream.cancel()
            else:
                call(request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            status = error.code().name
            details = error.details() or ""
            if status == "UNKNOWN" or any(sign in details for sign in UNHANDLED):
                with self._lock:
                    self.unhandled[f"{target.path}: {details[:200]}"] += 1
            waited_s = time.monotonic() - started  # a request's own random deadline is no hang
            if status == "DEADLINE_EXCEEDED" and timeout_s == HANG_S and waited_s > HANG_S / 2:
                with self._lock:
                    self.hangs.append(f"{target.path}: {details[:200]}")
        if not target.streams_in and status not in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"):  # the latter: its size
            try:
                target.message.FromString(messages[0])
            except DecodeError:
                with self._lock:
                    self.unhandled[f"{target.path}: no message, answered {status}"] += 1
        with self._lock:
            self.seconds[target.path] += time.monotonic() - started
            self.statuses[f"{target.path.rpartition('/')[2]} {status}"] += 1
            self.sent += 1


class Control(threading.Thread):
    """Asks the same requests over and over; every answer must be the first one."""

    def __init__(self, address: str) -> None:
        super().__init__(name="control")
        self._address = address
        self._over = threading.Event()
        self._requests = mixed_requests(77, 8)
        self.asked = self.differing = 0
        self.reasons: Counter[str] = Counter()
        self._expected = self._round()

    def _round(self) -> list[Answer]:
        with grpc.insecure_channel(self._address) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
            return [ask(stub, request) for request in self._requests]

    def run(self) -> None:
        while not self._over.is_set():
            for answer, expected in zip(self._round(), self._expected):
                self.asked += 1
                if answer != expected:
                    self.differing += 1
                    self.reasons[f"{answer.error} {answer.details}"[:200]] += 1

    def stop(self) -> None:
        self._over.set()
        self.join()


class Watched:
    """Processes that must live, and what they hold when nothing runs."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._processes = [psutil.Process(child.process.pid) for child in children if child.process is not None]
        self._processes += [below for process in self._processes for below in process.children(recursive=True)]

    def held(self) -> dict[str, tuple[int, int, int]]:
        """name -> (threads, file descriptors, resident MiB)"""
        return {
            f"{process.name()}-{process.pid}": (
                process.num_threads(),
                process.num_fds(),
                process.memory_info().rss >> 20,
            )
            for process in self._processes
        }

    def crashes(self) -> int:
        return sum(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in self._processes)


def leaks(
    before: dict[str, tuple[int, int, int]], after: dict[str, tuple[int, int, int]], client: Lockstep
) -> list[str]:
    values = dict(client.stats().values)
    found = [f"{name}={values[name]:g}" for name in ("requests_live", "kv_blocks_held") if values[name]]
    for name, (threads, fds, _) in after.items():
        # pools of threads and connections breathe; a leak by message would be hundreds
        if threads > before[name][0] + 12 or fds > before[name][1] + 24:
            found.append(f"{name}: {threads} threads and {fds} descriptors, {before[name][:2]} before")
    return found


def start(model: Path, log: Path) -> tuple[list[Child], str, str]:
    scripts = Path(sys.executable).parent
    worker, listen = (f"127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2))
    children = [
        Child(
            "worker",
            [
                sys.executable,
                str(scripts / "lockstep-worker"),
                "--model",
                str(model),
                "--listen",
                worker,
                "--threads",
                "1",
            ],
            dict(os.environ),
            log=log,
        ),
        Child(
            "scheduler",
            [
                sys.executable,
                str(scripts / "lockstep-scheduler"),
                "--workers",
                worker,
                "--listen",
                listen,
                "--max-num-seqs",
                "32",
                "--step-timeout",
                "5",
                "--kv-blocks",
                "400",
            ],
            dict(os.environ),
            log=log,
        ),
    ]
    for child in children:
        child.start()
    return children, listen, worker


def wait(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} within {timeout_s:g} s")
        time.sleep(0.1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, help="default: a tiny random model")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="lockstep-fuzz-") as folder:
        model = options.model
        if model is None:
            from tests.tiny_models import make_tiny

            model = make_tiny(Path(folder) / "tiny")
        log = Path(folder) / "log"
        children, listen, worker = start(model, log)
        try:
            return run(children, listen, worker, options.messages, options.seed, log)
        finally:
            for child in children:
                child.signal(9)
                if child.process is not None:
                    child.reap()
            if os.environ.get("FUZZ_LOG"):
                Path(os.environ["FUZZ_LOG"]).write_bytes(log.read_bytes())


def run(children: Sequence[Child], listen: str, worker: str, messages: int, seed: int, log: Path | None = None) -> int:
    client = Lockstep(listen)

    def serves() -> bool:
        try:
            return client.stats().state == "serving"
        except Exception:
            return False

    wait(serves, 60, "the services did not serve")
    attack = Attack(listen, worker, likely_messages(random.Random(seed)))
    control = Control(listen)
    watched = Watched(children)
    control.start()
    before: dict[str, tuple[int, int, int]] = {}
    share = max(1, messages // 10)
    for part in range(10):  # the first tenth warms pools up; what it leaves is the base line
        _attack(attack, share if part < 9 else messages - 9 * share, seed * 1000 + part * 100)
        if part == 0:
            before = watched.held()
        print(f"{attack.sent} messages, {control.asked} control answers", flush=True)
    control.stop()
    wait(serves, 60, "the services did not recover")
    time.sleep(2)
    crashes = watched.crashes()
    after = watched.held() if not crashes else before
    left = leaks(before, after, client)
    client.close()
    print("statuses: " + ", ".join(f"{name} {count}" for name, count in sorted(attack.statuses.items())))
    print("seconds: " + ", ".join(f"{path} {spent:.1f}" for path, spent in attack.seconds.most_common(6)))
    for name, held in after.items():
        print(f"{name}: threads, descriptors, MiB {before[name]} -> {held}")
    for text in [*attack.hangs[:5], *attack.unhandled, *left, *control.reasons]:
        print(f"  {text}")
    undecoded = log.read_bytes().count(b"DecodeError") if log is not None else 0
    unhandled = sum(attack.unhandled.values()) + undecoded
    print(
        f"messages={attack.sent} crashes={crashes} hangs={len(attack.hangs)} unhandled={unhandled} "
        f"leaks={len(left)} control={control.asked} differing={control.differing}"
    )
    bad = crashes or attack.hangs or unhandled or left or control.differing or not control.asked
    return 1 if bad else 0


def _attack(attack: Attack, messages: int, seed: int) -> None:
    shares = [messages // THREADS + (i < messages % THREADS) for i in range(THREADS)]
    threads = [
        threading.Thread(target=attack.run, args=(share, seed + i), daemon=True) for i, share in enumerate(shares)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    raise SystemExit(main())
