"""Time fixed workloads through the services on a GPU, and check in the same run that the tokens are right.

    python bench/serve_bench.py --model bench/configs/qwen3-8b --workload bench/workloads/mixed256.jsonl \\
        --numerics invariant --results bench/results/h200

Starts a worker and a scheduler as processes, waits until they serve, warms up, sends each workload over GenerateMany
from this process, and writes one JSON a workload and a table beside the peer's figures. A model folder without a
checkpoint is served with random weights.

Guards, in every run: greedy ids against the fp32 reference (`reference.py`), where no more of them may be wrong than in
a plain bf16 pass of torch; and in `invariant` 16 requests of each workload again, alone and without the cache, whose
ids must be those of the workload. A run that fails one has no figures.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import grpc
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from client.workload import prompt_ids  # noqa: E402
from protos import generation_pb2 as pb  # noqa: E402
from protos.generation_pb2_grpc import GenerationStub  # noqa: E402
from worker_svc.launch import tied  # noqa: E402

READY_MARK = "lockstep-scheduler: serving"
SOLO_REQUESTS, SOLO_TOKENS = 16, 48
GUARD_PROMPTS, GUARD_TOKENS = 4, 32
# tokens/s: (vLLM 0.24, its batch-invariant mode, target); prompt tokens/s for prefill32
PEERS: dict[tuple[str, str], tuple[int | None, int | None, int | None]] = {
    ("qwen3-8b", "single"): (190, 53, 250),
    ("qwen3-8b", "mixed256"): (9506, 6217, 11000),
    ("qwen3-8b", "steady64"): (2281, None, 2350),
    ("qwen3-8b", "prefill32"): (37092, 30441, 40000),
    ("qwen3-8b", "grpo16x16"): (12280, None, 15000),
    ("qwen3-8b", "longtail64"): (1390, None, 1800),
    ("qwen3-0.6b", "single"): (529, None, 1200),
    ("qwen3-0.6b", "mixed256"): (23700, None, 30000),
    ("qwen3-0.6b", "grpo16x16"): (23738, None, 28500),
    ("qwen3-0.6b", "steady64"): (6104, None, 6600),
    ("qwen3-0.6b", "prefill32"): (269149, None, 285000),
    ("olmoe-1b-7b", "single"): (518, None, 1000),
    ("olmoe-1b-7b", "mixed256"): (12659, None, 15000),
}


@dataclass(frozen=True, slots=True)
class Item:
    name: str
    prompt: list[int]
    max_tokens: int
    seed: int

    def message(self, name: str, **changes: Any) -> pb.ClientMessage:
        """As the workloads say: temperature 0.6, no truncation, end of sequence ignored."""
        request = pb.GenerateRequest(request_id=name, token_ids=pb.TokenIds(ids=self.prompt))
        sampling = {"temperature": 0.6, "seed": self.seed, "max_tokens": self.max_tokens, "ignore_eos": True}
        if "cache_salt" in changes:
            request.cache_salt = changes.pop("cache_salt")
        for key, value in (sampling | changes).items():
            setattr(request.sampling, key, value)
        return pb.ClientMessage(request=request)


def load(path: Path) -> list[Item]:
    lines = (json.loads(line) for line in path.read_text().splitlines() if line)
    return [
        Item(str(e["id"]), prompt_ids(e["prompt_seed"], e["prompt_len"]), e["max_tokens"], e["seed"]) for e in lines
    ]


@dataclass(slots=True)
class Stream:
    """What came back for one request, and when."""

    ids: list[int] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0
    gaps_ms: list[float] = field(default_factory=list)


async def send(
    address: str, messages: list[pb.ClientMessage], timeout_s: float = 600.0
) -> tuple[dict[str, Stream], float]:
    """All messages at once over one GenerateMany stream; what came back by request, and the seconds it took."""
    options = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        await channel.channel_ready()
        call = GenerationStub(channel).GenerateMany(timeout=timeout_s)
        streams = {m.request.request_id: Stream() for m in messages}
        open_requests = set(streams)
        start = time.perf_counter()

        async def write() -> None:
            for message in messages:
                await call.write(message)

        writing = asyncio.create_task(write())
        while open_requests:
            reply = await call.read()
            if reply is grpc.aio.EOF:
                raise RuntimeError(f"the stream ended with {len(open_requests)} requests open: {await call.details()}")
            now = time.perf_counter() - start
            for event in reply.events:
                stream = streams[event.request_id]
                if event.token_ids:
                    if stream.ids:
                        stream.gaps_ms.append((now - stream.last_s) * 1e3 / len(event.token_ids))
                    else:
                        stream.first_s = now
                    stream.ids.extend(event.token_ids)
                    stream.last_s = now
                if event.HasField("status") and event.status.code:
                    raise RuntimeError(f"request {event.request_id}: {event.status.message}")
                if event.HasField("usage"):
                    open_requests.discard(event.request_id)
        await writing
        await call.done_writing()
        return streams, now


def percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    points = np.percentile(values, [50, 90, 99])
    return {f"p{p}": round(float(v), 3) for p, v in zip((50, 90, 99), points)} | {"max": round(max(values), 3)}


class Gpu:
    """Samples utilisation and memory while a workload runs; nothing where NVML is not there."""

    def __init__(self) -> None:
        self.busy: list[int] = []
        self.peak_bytes = 0
        self._stop = Event()
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            self.name = str(pynvml.nvmlDeviceGetName(self._handle))
        except Exception:  # a machine without it is measured all the same
            self._nvml, self.name = None, "unknown"

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.busy, self.peak_bytes = [], 0
        self._stop.clear()
        thread = Thread(target=self._watch, daemon=True)
        thread.start()
        yield
        self._stop.set()
        thread.join()

    def _watch(self) -> None:
        while self._nvml is not None and not self._stop.wait(0.25):
            self.busy.append(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
            self.peak_bytes = max(self.peak_bytes, self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)


class Services:
    """A worker and a scheduler as processes of this one; their logs in a folder."""

    def __init__(self, options: argparse.Namespace, logs: Path) -> None:
        self.started = time.perf_counter()
        worker_port, port = _free_port(), _free_port()
        self.address = f"127.0.0.1:{port}"
        self._logs = logs
        logs.mkdir(parents=True, exist_ok=True)
        model = Path(options.model)
        weights = [] if list(model.glob("*.safetensors")) else ["--random-weights", "0"]
        self._worker_command = (
            "-m", "worker_svc.app", "--listen", f"127.0.0.1:{worker_port}", "--model", str(model),
            "--device", options.device, "--numerics", options.numerics, *weights, *options.worker_flag,
        )  # fmt: skip
        self._worker = self._run("worker", *self._worker_command)
        self._scheduler = self._run(
            "scheduler", "-m", "scheduler_svc.app", "--workers", f"127.0.0.1:{worker_port}", "--listen", self.address,
            "--block-size", str(options.block_size), "--max-num-seqs", str(options.max_num_seqs),
            "--max-batch-tokens", str(options.max_batch_tokens), "--max-seq-len", str(options.max_seq_len),
            "--pipeline-depth", str(options.pipeline_depth), "--step-timeout", "120",
        )  # fmt: skip
        deadline = time.monotonic() + options.start_timeout
        while READY_MARK not in self.log("scheduler"):
            ended = self._worker.poll() is not None or self._scheduler.poll() is not None
            if ended or "did not form" in self.log("worker") or time.monotonic() > deadline:
                self.stop()
                raise SystemExit(
                    f"the services did not start:\n{self.log('worker')[-4000:]}\n{self.log('scheduler')[-2000:]}"
                )
            time.sleep(0.05)
        self.start_s = time.perf_counter() - self.started

    def _run(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with (self._logs / f"{name}.log").open("wb") as log:
            return subprocess.Popen(tied([sys.executable, *command]), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)

    def replace_worker(self) -> None:
        """Kill the worker and start another in its place, as a supervisor would."""
        self._worker.kill()
        self._worker.wait()
        self._worker = self._run("worker", *self._worker_command)

    def log(self, name: str) -> str:
        return (self._logs / f"{name}.log").read_text(errors="replace")

    def start_split(self) -> dict[str, float]:
        """Seconds as the worker's log tells them."""
        return {name: float(s) for name, s in re.findall(r"(weights|kernels|graphs) in ([\d.]+) s", self.log("worker"))}

    def kernels_a_step(self) -> int | None:
        """Of one decoding row, as the worker's log tells it."""
        found = re.findall(r"(\d+) kernels in a step", self.log("worker"))
        return int(found[-1]) if found else None

    def stop(self) -> None:
        for process in (self._scheduler, self._worker):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in (self._scheduler, self._worker):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def commit() -> str:
    """LOCKSTEP_COMMIT where it is set (a copy of a checkout may know another), else git's; `unknown` outside both."""
    try:
        run = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("LOCKSTEP_COMMIT", "unknown")
    return os.environ.get("LOCKSTEP_COMMIT") or run.stdout.strip()


async def greedy_ids(address: str) -> list[tuple[list[int], list[int]]]:
    """(prompt, greedy ids) of a few short prompts."""
    items = [Item(f"guard-{i}", prompt_ids(9000 + i, 40 + 17 * i), GUARD_TOKENS, i) for i in range(GUARD_PROMPTS)]
    streams, _ = await send(address, [item.message(item.name, temperature=0.0) for item in items])
    return [(item.prompt, streams[item.name].ids) for item in items]


async def differing_alone(address: str, items: list[Item], streams: dict[str, Stream]) -> list[str]:
    """Of 16 random requests, those whose ids alone, from an empty cache, are not the workload's."""
    different = []
    for item in random.Random(0).sample(items, min(SOLO_REQUESTS, len(items))):
        tokens = min(item.max_tokens, SOLO_TOKENS)
        name = f"alone-{item.name}"
        alone, _ = await send(address, [item.message(name, max_tokens=tokens, cache_salt=name)])
        if alone[name].ids != streams[item.name].ids[:tokens]:
            different.append(item.name)
    return different


async def measure(options: argparse.Namespace, services: Services, gpu: Gpu, path: Path) -> dict[str, Any]:
    items = load(path)
    with gpu.watching():
        streams, seconds = await send(services.address, [item.message(item.name) for item in items], options.timeout)
    output, prompt = sum(len(s.ids) for s in streams.values()), sum(len(item.prompt) for item in items)
    assert output == sum(item.max_tokens for item in items), "a request ended early"
    figures: dict[str, Any] = {
        "model": Path(options.model).name, "workload": path.stem, "numerics": options.numerics, "tp": 1,
        "out_tok_s": round(output / seconds, 1), "prompt_tok_s": round(prompt / seconds, 1),
        "seconds": round(seconds, 3), "output_tokens": output, "prompt_tokens": prompt,
        "ttft_s": percentiles([s.first_s for s in streams.values()]),
        "inter_token_ms": percentiles([gap for s in streams.values() for gap in s.gaps_ms]),
        "gpu_busy_percent": round(float(np.mean(gpu.busy)), 1) if gpu.busy else None,
        "peak_memory_gib": round(gpu.peak_bytes / 2**30, 2),
        "device": gpu.name,
    }  # fmt: skip
    if options.numerics == "invariant" and options.guards:
        figures["differing_alone"] = await differing_alone(services.address, items, streams)
        figures["checked_alone"] = min(SOLO_REQUESTS, len(items))
    return figures


async def run(
    options: argparse.Namespace, services: Services
) -> tuple[list[dict[str, Any]], list[tuple[list[int], list[int]]]]:
    gpu = Gpu()
    warm = [Item(f"warm-{i}", prompt_ids(8000 + i, 100 + i), 20, i) for i in range(min(64, options.max_num_seqs))]
    await send(services.address, [item.message(item.name) for item in warm])
    greedy = await greedy_ids(services.address) if options.guards else []
    results = []
    for path in options.workload:
        for attempt in range(options.repeat):
            figures = await measure(options, services, gpu, path)
            figures["attempt"] = attempt
            print(json.dumps(figures), flush=True)
            results.append(figures)
    return results, greedy


def table(results: list[dict[str, Any]]) -> str:
    names = ("model", "workload", "numerics", "tok/s", "target", "vLLM 0.24", "its invariant mode", "seconds",
             "TTFT p50 s", "ITL p50/p99 ms", "GPU busy %")  # fmt: skip
    rows = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    for r in results:
        peer, invariant, target = PEERS.get((r["model"], r["workload"]), (None, None, None))
        speed = r["prompt_tok_s"] if r["workload"].startswith("prefill") else r["out_tok_s"]
        itl = r["inter_token_ms"]
        cells = (
            r["model"], r["workload"], r["numerics"], f"{speed:,.0f}", target or "", peer or "", invariant or "",
            r["seconds"], r["ttft_s"].get("p50", ""), f"{itl.get('p50', '')} / {itl.get('p99', '')}",
            r["gpu_busy_percent"],
        )  # fmt: skip
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="a folder with a config.json, with or without a checkpoint")
    parser.add_argument("--workload", type=Path, nargs="+", required=True)
    parser.add_argument("--numerics", choices=("invariant", "fast"), default="invariant")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-batch-tokens", type=int, default=8192)
    parser.add_argument("--max-seq-len", type=int, default=17408)
    parser.add_argument("--pipeline-depth", type=int, default=3, help="a small model needs 3 to hide the round trip")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--start-timeout", type=float, default=180.0)
    parser.add_argument("--no-guards", dest="guards", action="store_false", help="for tuning; writes no results")
    parser.add_argument(
        "--worker-flag", action="append", default=[], help="passed on to the worker, once for each word"
    )
    parser.add_argument("--results", type=Path, help="folder for MODEL-WORKLOAD-NUMERICS.json; none: print only")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/serve_bench"))
    options = parser.parse_args()

    services = Services(options, options.logs)
    try:
        print(f"serving after {services.start_s:.1f} s {services.start_split()}", flush=True)
        results, greedy = asyncio.run(run(options, services))
    finally:
        split, kernels = services.start_split(), services.kernels_a_step()
        services.stop()
    guard: dict[str, Any] = {}
    if options.guards:
        from reference import check_greedy

        guard = check_greedy(Path(options.model), greedy, options.device)
        print(json.dumps(guard), flush=True)
    import torch

    for figures in results:
        figures |= {
            "start_s": round(services.start_s, 1), "start_split_s": split, "kernels_a_step": kernels,
            "greedy": guard, "torch": torch.__version__,
            "commit": commit(), "command": "python " + " ".join(sys.argv),
        }  # fmt: skip
        failed = figures.get("differing_alone") or guard.get("wrong", 0) > guard.get("bf16_wrong", 0)
        if failed:
            print(
                f"GUARD FAILED for {figures['workload']}: alone {figures.get('differing_alone')}, {guard}", flush=True
            )
        elif options.results and options.guards:
            options.results.mkdir(parents=True, exist_ok=True)
            name = f"{figures['model']}-{figures['workload']}-{figures['numerics']}.json".lower()
            (options.results / name).write_text(json.dumps(figures, indent=2) + "\n")
    print(table(results), flush=True)


if __name__ == "__main__":
    main()
