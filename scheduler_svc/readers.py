"""Who reads streams over gRPC: waits for news, paces messages, notices a reader that takes nothing.

One event loop, no locks. A step wakes a reader once; while many streams run, a reader also waits between messages, so
that one core keeps up: tokens then come several at a time.
"""

import asyncio
import time
from collections.abc import Awaitable, Iterator

from google.rpc import code_pb2
from google.rpc.status_pb2 import Status

from protos import generation_pb2 as pb
from protos.malformed import Malformed
from scheduler_svc import limits
from scheduler_svc.streams import Stream

MIN_INTERVAL_S = 0.008  # shorter waits than this save nothing
COUNTED_FOR_S = 0.05  # so long the number of readers is good for


class Pace:
    """How long a reader waits between two messages, given how many there are; and which of them are stuck."""

    def __init__(self) -> None:
        self._readers: set[Reader] = set()
        self._busy = 0  # readers with something to read, as last counted
        self._counted_at = float("-inf")

    def add(self, reader: "Reader") -> None:
        self._readers.add(reader)

    def remove(self, reader: "Reader") -> None:
        self._readers.discard(reader)

    def is_used(self) -> bool:
        return bool(self._readers)

    def interval_s(self) -> float:
        if (now := time.monotonic()) - self._counted_at > COUNTED_FOR_S:
            self._busy, self._counted_at = sum(reader.is_busy() for reader in self._readers), now
        interval = min(self._busy / limits.MESSAGES_PER_SECOND, limits.MAX_COALESCING_SECONDS)
        return interval if interval >= MIN_INTERVAL_S else 0.0

    def break_off_stalled(self, now: float, stall_s: float = limits.STALL_SECONDS) -> None:
        """Cancel writes that nobody takes; to be called about once a second while there are readers."""
        for reader in list(self._readers):
            since = reader.writing_since
            if since is not None and now - since > (1.0 if reader.has_failed() else stall_s):
                reader.break_off()


class Reader:
    """What the readers of one and of many streams share: a wake-up and the write in progress."""

    def __init__(self) -> None:
        self.writing_since: float | None = None
        self.stalled = False
        self._news = False
        self._waiter: asyncio.Future[None] | None = None
        self._task = asyncio.current_task()

    def wake(self) -> None:
        self._news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        if not self._news:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._news = False

    async def write(self, writing: Awaitable[None]) -> None:
        self.writing_since = time.monotonic()
        await writing
        self.writing_since = None

    def break_off(self) -> None:
        """Out of a write that hangs: its task is cancelled and must look at `stalled`."""
        self.stalled = True
        self.writing_since = None
        assert self._task is not None
        self._task.cancel()

    def has_failed(self) -> bool:
        raise NotImplementedError

    def is_busy(self) -> bool:
        """Whether there is something to read, now or soon."""
        return True


class OneReader(Reader):
    """Reads the stream of one Generate."""

    def __init__(self) -> None:
        super().__init__()
        self.stream: Stream | None = None

    def notify(self, stream: Stream) -> None:
        self.wake()

    def has_failed(self) -> bool:
        return self.stream is not None and self.stream.failure is not None


class ManyReader(Reader):
    """Reads every request of one GenerateMany; a step's news of all of them leave in one message."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[str, Stream] = {}
        self.half_closed = False
        self.malformed: Malformed | None = None  # what the client sent instead of a message
        self._dirty: dict[int, Stream] = {}
        self._refusals: list[pb.GenerateEvent] = []
        self._room = asyncio.Event()  # for more refusals
        self._room.set()

    def add(self, stream: Stream) -> None:
        self.live[stream.request.request_id] = stream

    def notify(self, stream: Stream) -> None:
        self._dirty[stream.request.key] = stream
        self.wake()

    def refuse(self, request_id: str, status: Status) -> None:
        self._refusals.append(pb.GenerateEvent(request_id=request_id, status=status))
        if len(self._refusals) >= limits.MAX_UNREAD_REFUSALS:
            self._room.clear()
        self.wake()

    async def has_room(self) -> None:
        """Wait until the reader has taken its refusals: whoever reads none gets no further."""
        await self._room.wait()

    def is_busy(self) -> bool:
        return bool(self.live or self._dirty)

    def close_requests(self) -> None:
        """The client has sent all that it will."""
        self.half_closed = True
        self.wake()

    def is_over(self) -> bool:
        if self.malformed is not None:
            return True
        return self.half_closed and not (self.live or self._refusals or self._dirty)

    def has_failed(self) -> bool:
        return any(
            stream.failure is not None and stream.failure.code == code_pb2.RESOURCE_EXHAUSTED
            for stream in self._dirty.values()
        )

    def take(self) -> Iterator[pb.GenerateEvents]:
        """All news, in messages below the bound."""
        message, size = pb.GenerateEvents(), 0
        for event in self._events():
            message.events.append(event)
            size += event.ByteSize()
            if size > limits.MAX_EVENT_BYTES:
                yield message
                message, size = pb.GenerateEvents(), 0
        if message.events:
            yield message

    def _events(self) -> list[pb.GenerateEvent]:
        events, self._refusals = self._refusals, []
        self._room.set()
        dirty, self._dirty = self._dirty, {}
        for stream in dirty.values():
            request_id = stream.request.request_id
            news = stream.take()
            if stream.done:
                if self.live.get(request_id) is stream:
                    del self.live[request_id]
                if stream.failure is not None:
                    if not news:
                        news = [pb.GenerateEvent()]
                    news[-1].status.CopyFrom(stream.failure)
            for event in news:
                event.request_id = request_id
            events += news
        return events
