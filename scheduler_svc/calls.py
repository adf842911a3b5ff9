"""What every streaming call shares, whatever its protocol: admission, the reading loop, a status at the end.

Knows deadlines, disconnects and how a status travels over gRPC; the rules of fields are validation.py's, those of
requests front_end.py's. Invariants: a call that ends for whatever reason leaves no live request behind; nothing is
written before the first token.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from google.rpc import code_pb2
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from protos import generation_pb2 as pb
from protos.step import Int32s
from scheduler_svc import limits, statuses
from scheduler_svc.front_end import Failure, FrontEnd
from scheduler_svc.readers import ManyReader, OneReader, Pace, Reader
from scheduler_svc.streams import Stream
from scheduler_svc.validation import InvalidRequest, prompt_ids

LONG_TEXT_BYTES = 8 << 10  # from here tokenizing leaves the event loop

Context = Any  # grpc.aio.ServicerContext, generic in ways that add nothing here


class Calls:
    """The streaming calls of one server, over one front end."""

    def __init__(self, front: FrontEnd) -> None:
        self.front = front
        self._pace = Pace()
        self._tokenizing = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        self._watching: asyncio.Task[None] | None = None

    async def serve_one(
        self,
        request: pb.GenerateRequest,
        context: Context,
        write: Callable[[pb.GenerateEvent], Awaitable[None]],
    ) -> None:
        """One request from its validation to the call's status."""
        reader = OneReader()
        request_id = request.request_id if request.HasField("request_id") else uuid.uuid4().hex
        try:
            stream = await self.admit(request, request_id, context, reader)
        except Failure as failure:
            await abort(context, failure.status)
        reader.stream = stream
        try:
            with self.reading(reader):
                while not (stream.done and not stream.has_news()):
                    await reader.wait()
                    for event in stream.take():
                        await reader.write(write(event))
                    await self._rest(stream)
        except asyncio.CancelledError:
            if not reader.stalled:
                raise
            uncancel()
            self.front.fail(stream, stall_status())
        finally:
            self.front.cancel(stream)
        if stream.failure is not None:
            await abort(context, stream.failure)

    async def admit(
        self, request: pb.GenerateRequest, request_id: str, context: Context, reader: OneReader | ManyReader
    ) -> Stream:
        """Raises Failure."""
        arrival = time.monotonic()
        remaining = context.time_remaining()
        try:
            prompt = await self._prompt(request)
            return self.front.open(
                request,
                prompt,
                request_id,
                reader,
                arrival=arrival,
                deadline=None if remaining is None else arrival + remaining,
                trace_parent=_trace_parent(context),
            )
        except Failure as failure:
            self.front.refused(failure.status)
            raise

    @contextlib.contextmanager
    def reading(self, reader: Reader) -> Iterator[None]:
        """While a call reads: it counts for the pace, and somebody watches that it does not stall."""
        self._pace.add(reader)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            self._pace.remove(reader)

    async def _prompt(self, request: pb.GenerateRequest) -> Int32s:
        facts = self.front.check_open().facts
        try:
            kind = request.WhichOneof("prompt")
            if kind in ("text", "chat") and request.ByteSize() > LONG_TEXT_BYTES:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._tokenizing, prompt_ids, request, facts)
            return prompt_ids(request, facts)
        except InvalidRequest as error:
            raise Failure(statuses.of_error(error)) from error

    async def _rest(self, stream: Stream) -> None:
        interval = self._pace.interval_s()
        if interval and not stream.done:
            await asyncio.sleep(interval)

    async def _watch(self) -> None:
        """Only while somebody reads: an idle server has nothing to wake up for."""
        while self._pace.is_used():
            await asyncio.sleep(1.0)
            now = time.monotonic()
            self._pace.break_off_stalled(now)
            self.front.watch(now)


def _trace_parent(context: Context) -> str:
    """The caller's span, as W3C metadata."""
    for name, value in context.invocation_metadata() or ():
        if name == "traceparent" and isinstance(value, str):
            return value
    return ""


def stall_status() -> Status:
    message = f"the reader took no message for {limits.STALL_SECONDS:g} s"
    return statuses.status(code_pb2.RESOURCE_EXHAUSTED, message)


def uncancel() -> None:
    """The task was cancelled by ourselves to get out of a write, and goes on."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()


async def abort(context: Context, status: Status) -> NoReturn:
    """End the call with a status and its details."""
    await context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status raises")
