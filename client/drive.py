"""One client process of a load test: sends its share of the requests and writes down what comes back.

Nothing is retried and nothing is decided here: a failure is a figure. Runs on grpc.aio (uvloop where there is one).
It also watches itself: how late requests were sent, how late the event loop woke up, how much of a core it used.
"""

import asyncio
import gc
import multiprocessing as mp
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import grpc

from client.channel import Tls, call_metadata, open_async
from client.errors import failure_of_call
from client.records import Record
from client.workload import Item
from protos import generation_pb2 as pb
from protos import generation_pb2_grpc

_TICK_S = 0.01
_REPORT_S = 0.2


@dataclass(frozen=True, slots=True)
class Share:
    """What one process is to do. `due`: seconds from the start for each item; None: as `places` become free."""

    address: str
    items: list[Item]
    due: list[float] | None
    places: int
    name: str
    timeout_s: float | None = None
    token: str | None = None
    tls: Tls | None = None


@dataclass(slots=True)
class Health:
    """How well a client process kept up."""

    cpu_share: float = 0.0
    late_send_ms: float = 0.0  # the worst
    lags_ms: list[float] = field(default_factory=list)  # lateness of a 10 ms timer


@dataclass(slots=True)
class Progress:
    """Counts since the run began, for the live display."""

    sent: int = 0
    first: int = 0  # have their first token
    done: int = 0
    failed: int = 0
    tokens: int = 0
    messages: int = 0
    waited_s: float = 0.0  # until a first token, summed over those that have it
    with_token: int = 0
    cpu_share: float = 0.0


class Driver:
    """Sends items and records answers. `take` gives the index of the next item in closed loop, None at the end."""

    def __init__(self, share: Share, take: Callable[[], int | None]) -> None:
        self._share = share
        self._take = take
        self._metadata = call_metadata(share.token)
        self.progress = Progress()
        self.health = Health()
        self.fresh: list[Record] = []  # ended, not reported yet

    async def prepare(self) -> grpc.aio.Channel:
        """A connected channel, so that the first request does not pay for the connection."""
        channel = open_async(self._share.address, self._share.tls)
        await asyncio.wait_for(channel.channel_ready(), 30.0)
        return channel

    async def run(self, channel: grpc.aio.Channel, start: float) -> None:
        """Everything, from `start` on the monotonic clock."""
        generate = generation_pb2_grpc.GenerationStub(channel).Generate  # type: ignore[no-untyped-call]
        share = self._share
        messages = [item.message(f"{share.name}-{index}") for index, item in enumerate(share.items)]
        await asyncio.sleep(max(0.0, start - time.monotonic()))
        gc.collect()
        gc.disable()  # a collection over hundreds of thousands of records would be measured as latency
        ticker = asyncio.ensure_future(self._tick())
        cpu, wall = time.process_time(), time.monotonic()
        try:
            if share.due is not None:
                await self._open_loop(generate, messages, share.due, start)
            else:
                places = [self._place(generate, messages, start) for _ in range(share.places)]
                await asyncio.gather(*places)
        finally:
            ticker.cancel()
            gc.enable()
            self.health.cpu_share = (time.process_time() - cpu) / max(1e-9, time.monotonic() - wall)

    async def _open_loop(self, generate: Any, messages: list[Any], due: list[float], start: float) -> None:
        running = []
        for index in sorted(range(len(due)), key=due.__getitem__):
            await asyncio.sleep(max(0.0, start + due[index] - time.monotonic()))
            running.append(asyncio.ensure_future(self._one(generate, messages[index], index, due[index], start)))
        await asyncio.gather(*running)

    async def _place(self, generate: Any, messages: list[Any], start: float) -> None:
        while (index := self._take()) is not None:
            await self._one(generate, messages[index], index, time.monotonic() - start, start)

    async def _one(self, generate: Any, message: pb.GenerateRequest, index: int, due: float, start: float) -> None:
        sent = time.monotonic() - start
        record = Record(self._share.items[index].id, due, sent)
        times, counts, progress = record.times, record.counts, self.progress
        self.health.late_send_ms = max(self.health.late_send_ms, (sent - due) * 1000)
        progress.sent += 1
        usage = None
        try:
            async for event in generate(message, timeout=self._share.timeout_s, metadata=self._metadata):
                count = len(event.token_ids)
                if count:
                    if not times:
                        progress.first += 1
                        progress.with_token += 1
                        progress.waited_s += time.monotonic() - start - sent
                    times.append(time.monotonic() - start)
                    counts.append(count)
                    progress.tokens += count
                progress.messages += 1
                if event.HasField("usage"):
                    usage = event.usage
                if event.HasField("finish") and event.finish.reason >= pb.FINISH_REASON_ABORT:
                    record.code = "ABORTED"
        except grpc.RpcError as error:
            failure = failure_of_call(error)
            record.code, record.error = failure.code, failure.message
        record.ended = time.monotonic() - start
        if usage is not None:
            record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens
            record.cached_tokens, record.queue_ms = usage.cached_tokens, usage.queue_ms
        elif record.ok:
            record.code, record.error = "UNKNOWN", "the stream ended without usage"
        if not times:
            progress.first += 1  # it no longer waits for one
        progress.done += 1
        progress.failed += not record.ok
        self.fresh.append(record)

    async def _tick(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(_TICK_S)
            self.health.lags_ms.append((time.monotonic() - before - _TICK_S) * 1000)


def process_main(pipe: Connection, counter: Any, share: Share) -> None:
    """A spawned process: says "ready", is told the start, reports until done."""

    def take() -> int | None:
        with counter.get_lock():
            index: int = counter.value
            counter.value += 1
        return index if index < len(share.items) else None

    try:
        import uvloop

        runner: Any = uvloop.run
    except ImportError:
        runner = asyncio.run
    try:
        runner(_serve(pipe, Driver(share, take)))
    except (KeyboardInterrupt, BrokenPipeError, EOFError):
        pass  # the parent is leaving; it tells the person
    except Exception as error:
        pipe.send(("failed", f"{type(error).__name__}: {error}"))


async def _serve(pipe: Connection, driver: Driver) -> None:
    channel = await driver.prepare()
    pipe.send(("ready", None))
    start = await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    reporter = asyncio.ensure_future(_report(pipe, driver))
    await driver.run(channel, start)
    reporter.cancel()
    while driver.fresh:
        _send_report(pipe, driver)
    pipe.send(("done", driver.health))
    await channel.close(None)


async def _report(pipe: Connection, driver: Driver) -> None:
    cpu, wall = time.process_time(), time.monotonic()
    while True:
        await asyncio.sleep(_REPORT_S)
        driver.progress.cpu_share = (time.process_time() - cpu) / (time.monotonic() - wall)
        cpu, wall = time.process_time(), time.monotonic()
        _send_report(pipe, driver)


def _send_report(pipe: Connection, driver: Driver) -> None:
    fresh, driver.fresh = driver.fresh[:200], driver.fresh[200:]
    pipe.send(("progress", driver.progress))
    if fresh:
        pipe.send(("records", fresh))


SPAWN = mp.get_context("spawn")  # never fork: gRPC's threads do not survive it
