"""What a delivered token costs the front end: `python -m bench.stream_bench --streams 512 --rate 50 --seconds 20`.

The real scheduler process and engine process over an executor that draws for every row at a fixed pace; one client
process reads all streams. Detokenisation and stop strings are on. CPU time is that of the front-end process, user and
system, over the middle of the run; the machine may be busy otherwise. Needs a tokenizer: the demo model's by default.
"""

import argparse
import asyncio
import functools
import json
import multiprocessing
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import psutil

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc as rpc
from protos.step import Description, GroupConfig, StepBatch, StepResult
from worker_svc.slots import SlotTable

TEXT = (
    "The sun rose over the quiet harbour, and the boats lay still as if they were painted on the water. Nobody spoke; "
    "even the gulls had found something better to do. In the café 日本の朝 someone laughed, and then it was over. "
)


@dataclass(frozen=True)
class Load:
    """What the client asks for."""

    streams: int
    stops: int
    many: bool

    def request(self, at: int) -> pb.GenerateRequest:
        stops = [f"never {k} here" for k in range(self.stops)]
        sampling = pb.SamplingParams(max_tokens=60000, seed=at, stop=stops)
        return pb.GenerateRequest(request_id=str(at), token_ids=pb.TokenIds(ids=[at % 1000] * 16), sampling=sampling)


class Paced:
    """An executor whose every row says the text's next token, one step each `interval_s`."""

    def __init__(self, folder: str, interval_s: float) -> None:
        from scheduler_svc.text import Tokenizer

        self._folder, self._interval_s = folder, interval_s
        tokenizer = Tokenizer(Path(folder))
        self._ids = np.array(tokenizer.encode(TEXT, add_special_tokens=False), np.int32)
        self._vocab_size = 1 + int(max(self._ids.max(), 49151))
        self._steps: SimpleQueue[tuple[StepBatch, Future[StepResult]]] = SimpleQueue()
        Thread(target=self._run, daemon=True).start()

    def describe(self) -> Description:
        return Description(
            rank=0,
            tp=1,
            model="paced",
            model_path=self._folder,
            vocab_size=self._vocab_size,
            max_position_embeddings=1 << 20,
            num_layers=1,
            kv_heads=1,
            head_dim=1,
            dtype="float32",
            kv_dtype="float32",
            device="none",
            memory_bytes=1 << 30,
            kv_bytes_per_token=1,
            eos_token_ids=(),
            bos_token_id=None,
            fingerprint={"numerics": "paced"},
        )

    def join(self, config: GroupConfig) -> int:
        self._table = SlotTable(config.max_num_seqs, -(-config.max_seq_len // config.block_size))
        return 1 << 16

    def step(self, batch: StepBatch) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        self._steps.put((batch, future))
        return future

    def close(self) -> None:
        pass

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            batch, future = self._steps.get()
            plan = self._table.apply(batch)
            slots = plan.slots[plan.samples]
            position = (plan.first_position + plan.num_new)[plan.samples] + 7 * slots
            drawn = self._ids[position % len(self._ids)]
            self._table.drawn(plan, drawn)
            due = max(due + self._interval_s, time.monotonic() - self._interval_s)
            time.sleep(max(0.0, due - time.monotonic()))
            future.set_result(
                StepResult(batch.epoch, batch.seq, 0, token_ids=drawn, logprobs=np.zeros(len(drawn), "f4"))
            )


def serve(folder: str, interval_s: float, streams: int) -> None:
    """The scheduler process."""
    from bench.stream_bench import Paced as Pickled
    from scheduler_svc import app, logs
    from scheduler_svc.engine_process import EngineStart

    flags = ["--workers", "paced:1", "--listen", "127.0.0.1:0", "--max-num-seqs", str(streams)]
    flags += ["--max-batch-tokens", str(4 * streams), "--max-seq-len", "65536", "--tokenizer", folder]
    config, _ = app.configure(flags)
    logs.set_up("bench", "text", 30)
    raise SystemExit(app.run(config, EngineStart(config.engine, functools.partial(Pickled, folder, interval_s))))


async def read(address: str, load: Load, seconds: float, counts: Any) -> None:
    """The client process: counts messages and tokens as they come, and the longest gaps."""
    import grpc

    gaps: list[float] = []

    async def one(stub: Any, at: int) -> None:
        await asyncio.sleep(at / load.streams)
        last = time.monotonic()
        async for event in stub.Generate(load.request(at)):
            counts[0] += len(event.token_ids)
            counts[1] += 1
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    async def all_at_once(stub: Any) -> None:
        call = stub.GenerateMany()
        for at in range(load.streams):
            await call.write(pb.ClientMessage(request=load.request(at)))
        last = time.monotonic()
        async for message in call:
            counts[0] += sum(len(event.token_ids) for event in message.events)
            counts[1] += 1
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    async with grpc.aio.insecure_channel(address) as channel:
        stub = rpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        works = [all_at_once(stub)] if load.many else [one(stub, at) for at in range(load.streams)]
        calls = [asyncio.create_task(work) for work in works]
        await asyncio.sleep(seconds)
        counts[2] = float(np.percentile(gaps, 99)) * 1000
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


def client(address: str, load: Load, seconds: float, counts: Any) -> None:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(read(address, load, seconds, counts))


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--rate", type=float, default=50.0, help="tokens a second of each stream")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--stops", type=int, default=2, help="stop strings of each request")
    parser.add_argument("--many", action="store_true", help="one GenerateMany instead of a Generate each")
    parser.add_argument("--tokenizer", help="a snapshot folder; default: the demo model")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", nargs=3, metavar=("FOLDER", "INTERVAL", "STREAMS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve[0], float(options.serve[1]), int(options.serve[2]))
    folder = (
        options.tokenizer
        or subprocess.check_output([sys.executable, "-m", "worker_svc.loading.demo_model"], text=True)
        .strip()
        .splitlines()[-1]
    )
    command = [
        sys.executable,
        "-m",
        "bench.stream_bench",
        "--serve",
        folder,
        str(1 / options.rate),
        str(options.streams),
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        address = server.stdout.readline().split()[-1]
        report = measure(server.pid, address, options)
    finally:
        server.send_signal(signal.SIGINT)
        server.send_signal(signal.SIGINT)
        server.wait(10)
    print(json.dumps(report) if options.json else "\n".join(f"{name:32} {value:.2f}" for name, value in report.items()))


def measure(pid: int, address: str, options: argparse.Namespace) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    counts = context.Array("d", 3, lock=False)
    ramp = 3.0
    reader = context.Process(
        target=client,
        args=(address, Load(options.streams, options.stops, options.many), options.seconds + 2 * ramp, counts),
    )
    reader.start()
    front = psutil.Process(pid)
    (engine,) = front.children()
    processes = [front, engine, psutil.Process(reader.pid)]
    while counts[0] == 0:
        time.sleep(0.05)
    time.sleep(ramp)
    before, began = [*map(cpu_s, processes), counts[0], counts[1]], time.monotonic()
    time.sleep(options.seconds)
    after, seconds = [*map(cpu_s, processes), counts[0], counts[1]], time.monotonic() - began
    front_s, engine_s, client_s, tokens, messages = (now - was for now, was in zip(after, before))
    reader.join(30)
    return {
        "streams": float(options.streams),
        "tokens a second, asked": options.streams * options.rate,
        "tokens a second, delivered": tokens / seconds,
        "messages a second": messages / seconds,
        "tokens a message": tokens / messages,
        "front end, us a token": front_s / tokens * 1e6,
        "front end, share of a core": front_s / seconds,
        "engine, share of a core": engine_s / seconds,
        "client, share of a core": client_s / seconds,
        "p99 gap of messages, ms": counts[2],
    }


if __name__ == "__main__":
    main()
