"""The asyncio client: AsyncLockstep.

The same as blocking.py over grpc.aio; what to send, what arrived and when to give up is in run.py, batch.py, retry.py.
Invariant: leaving a stream in any way (break, exception, aclose, task cancellation) cancels its call.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Unpack

import grpc

from client.batch import Batch, Outcome
from client.blocking import ENDED_EARLY
from client.channel import DEFAULT_ADDRESS, Channels, Metadata, Tls, call_metadata, open_async
from client.errors import failure_of_call
from client.requests import Chat, Options, Prompt, build
from client.results import Completion, Delta
from client.retry import Patience, RetryPolicy
from client.run import Run
from client.traces import trace_metadata
from protos import generation_pb2 as pb
from protos import generation_pb2_grpc


class AsyncStream(AsyncIterator[Delta]):
    """Deltas as they arrive. Leaving the loop cancels the request; `completion` is what has arrived."""

    def __init__(self, run: Run, deltas: AsyncIterator[Delta]) -> None:
        self._run = run
        self._deltas: Any = deltas

    async def __anext__(self) -> Delta:
        return await self._deltas.__anext__()  # type: ignore[no-any-return]

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel the request, if it still runs."""
        await self._deltas.aclose()

    @property
    def request_id(self) -> str:
        return self._run.request_id

    @property
    def completion(self) -> Completion:
        return self._run.completion()


class AsyncLockstep:
    """As Lockstep, for one event loop. Its channels are made in the loop that first uses them."""

    def __init__(
        self,
        addresses: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        token: str | None = None,
        tls: Tls | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._channels = Channels(addresses, open_async, tls)
        self._metadata = call_metadata(token)
        self.retry = retry or RetryPolicy()

    async def __aenter__(self) -> "AsyncLockstep":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        for channel in self._channels.opened():
            await channel.close(None)

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer. Raises LockstepError."""
        return await self.complete(build(prompt, **options))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """The answer as it comes. Raises LockstepError from the loop."""
        return self.stream_request(build(prompt, **options))

    async def chat(self, messages: Sequence[dict[str, str]], **options: Unpack[Options]) -> Completion:
        """The whole answer to a conversation."""
        return await self.generate(Chat(messages), **options)

    async def batch(
        self, prompts: Iterable[Prompt | pb.GenerateRequest], *, window: int = 256, **options: Unpack[Options]
    ) -> list[Outcome]:
        """Every answer, in the order of the prompts; an error takes its own request's place and no other's."""
        outcomes: dict[int, Outcome] = {}
        async for index, outcome in self.batch_stream(prompts, window=window, **options):
            if not isinstance(outcome, Delta):
                outcomes[index] = outcome
        return [outcomes[index] for index in sorted(outcomes)]

    def batch_stream(
        self, prompts: Iterable[Prompt | pb.GenerateRequest], *, window: int = 256, **options: Unpack[Options]
    ) -> AsyncIterator[tuple[int, Delta | Outcome]]:
        """(index of the prompt, delta) as they come, and (index, Completion or LockstepError) once for each."""
        now = time.monotonic()
        runs = [
            self._run(one if isinstance(one, pb.GenerateRequest) else build(one, **options), now) for one in prompts
        ]
        return self._many(Batch(runs, window, random.random), self._of_request())

    async def complete(self, request: pb.GenerateRequest) -> Completion:
        """The whole answer to a request that is already in the wire's form."""
        async with self.stream_request(request) as stream:
            async for _ in stream:
                pass
            return stream.completion

    def stream_request(self, request: pb.GenerateRequest) -> AsyncStream:
        """The same as it comes."""
        run = self._run(request, time.monotonic())
        return AsyncStream(run, self._one(run, self._of_request()))

    async def abort(self, *request_ids: str) -> list[str]:
        """Ends requests, whoever made them; those that were live."""
        reply = await self._unary("Abort", pb.AbortRequest(request_ids=request_ids))
        return list(reply.aborted)

    async def info(self) -> pb.ModelInfo:
        """The model and the limits of the server."""
        reply: pb.ModelInfo = await self._unary("GetModelInfo", pb.GetModelInfoRequest())
        return reply

    async def stats(self) -> pb.StatsReply:
        """Counters and gauges, once."""
        reply: pb.StatsReply = await self._unary("Stats", pb.StatsRequest())
        return reply

    def _run(self, request: pb.GenerateRequest, now: float) -> Run:
        return Run(request, self.retry, now, len(self._channels.addresses))

    def _of_request(self) -> Metadata:
        """Metadata of a request and of its repetitions, whoever drives the loop that reads it."""
        return (*self._metadata, *trace_metadata())

    def _stub(self) -> Any:
        return generation_pb2_grpc.GenerationStub(self._channels.current())  # type: ignore[no-untyped-call]

    async def _one(self, run: Run, metadata: Metadata) -> AsyncIterator[Delta]:
        while True:
            address, now = self._channels.address, time.monotonic()
            call = self._stub().Generate(run.message(now), timeout=run.remaining_s(now), metadata=metadata)
            try:
                async for event in call:
                    delta = run.feed(event, time.monotonic())
                    if delta is not None:
                        yield delta
                if run.complete:
                    return
                failure = ENDED_EARLY
            except grpc.RpcError as error:
                failure = failure_of_call(error)
            finally:
                call.cancel()
            self._channels.failed(address)
            await asyncio.sleep(run.failed(failure, time.monotonic(), random.random()))

    async def _many(self, batch: Batch, metadata: Metadata) -> AsyncIterator[tuple[int, Delta | Outcome]]:
        while not batch.done:
            address, changed = self._channels.address, asyncio.Event()
            call = self._stub().GenerateMany(metadata=metadata)
            sender = asyncio.ensure_future(_send(call, batch, changed))
            try:
                async for message in call:
                    for event in message.events:
                        for news in batch.feed(event, time.monotonic()):
                            yield news
                    changed.set()
                failure = ENDED_EARLY
            except grpc.RpcError as error:
                failure = failure_of_call(error)
            finally:
                sender.cancel()
                call.cancel()
            batch.disconnected(failure, time.monotonic())
            for ended in batch.ended():
                yield ended
            if not batch.done:
                self._channels.failed(address)
                await asyncio.sleep(batch.wait_s(time.monotonic()) or 0.0)

    async def _unary(self, method: str, request: Any) -> Any:
        patience = Patience(self.retry, time.monotonic())
        while True:
            address = self._channels.address
            try:
                return await getattr(self._stub(), method)(request, timeout=30.0, metadata=self._metadata)
            except grpc.RpcError as error:
                failure = failure_of_call(error)
            self._channels.failed(address)
            wait = patience.wait_s(failure, 1, time.monotonic(), random.random())
            if wait is None:
                raise failure.error()
            await asyncio.sleep(wait)


async def _send(call: Any, batch: Batch, changed: asyncio.Event) -> None:
    """The request side of one GenerateMany stream."""
    with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # the reading side tells what went wrong
        while True:
            changed.clear()
            now = time.monotonic()
            for message in batch.ready(now):
                await call.write(message)
            if batch.done:
                await call.done_writing()
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), batch.wait_s(now))
