"""A server of known behaviour: what it sends and when is in the request, and it writes down when it really sent it.

The script of a request travels in its `tenant` as JSON (see Script), so that one server plays all of them. It knows
nothing of models: token i of a request is (len(prompt) + i) mod 1000, its text "<id> ", the same on every server, which
makes resumed streams comparable.
"""

import asyncio
import json
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc


@dataclass(frozen=True)
class Script:
    """How a request goes. Times in seconds."""

    ttft: float = 0.0
    gap: float = 0.0
    per_message: int = 1  # tokens in each message
    empty_first: bool = False  # a message without tokens, at once
    stall_at: int = -1  # before this token
    stall: float = 0.0
    fail_at: int = -1  # before this token
    fail_code: str = "INTERNAL"
    refuse: int = 0  # the first so many attempts are RESOURCE_EXHAUSTED
    retry_after: float = 0.05
    tokens: int = -1  # -1: max_tokens
    aborted: bool = False  # somebody ended it


def script(**behaviour: Any) -> str:
    """For the `tenant` field."""
    return json.dumps(behaviour)


@dataclass
class Sent:
    """What the server did for one request id, by its own clock (time.monotonic)."""

    arrived: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    cancelled: int = 0
    metadata: dict[str, str] = field(default_factory=dict)


class MockServicer(generation_pb2_grpc.GenerationServicer):
    def __init__(self, fingerprint: str = "mock") -> None:
        self.fingerprint = fingerprint
        self.default = Script()
        self.sent: dict[str, Sent] = defaultdict(Sent)
        self.refused: dict[str, int] = defaultdict(int)
        self.tokens = 0
        self.kill = asyncio.Event()  # ends every stream with UNAVAILABLE
        self.live: set[str] = set()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        sent = self.sent[request.request_id]
        sent.metadata = {key: value for key, value in context.invocation_metadata()}
        try:
            async for event in self._events(request):
                yield event
        except asyncio.CancelledError:
            sent.cancelled += 1
            raise
        except _Failed as failed:
            await context.abort_with_status(rpc_status.to_status(failed.status))

    async def GenerateMany(self, messages: Any, context: Any) -> AsyncIterator[pb.GenerateEvents]:
        queue: asyncio.Queue[pb.GenerateEvent | None] = asyncio.Queue()
        tasks: set[asyncio.Task[None]] = set()

        async def one(request: pb.GenerateRequest) -> None:
            try:
                async for event in self._events(request):
                    event.request_id = request.request_id
                    await queue.put(event)
            except _Failed as failed:
                await queue.put(pb.GenerateEvent(request_id=request.request_id, status=failed.status))

        async def read() -> None:
            async for message in messages:
                tasks.add(asyncio.ensure_future(one(message.request)))
            await asyncio.gather(*tasks)
            await queue.put(None)

        reader = asyncio.ensure_future(read())
        killed = asyncio.ensure_future(self.kill.wait())
        try:
            while True:
                getter = asyncio.ensure_future(queue.get())
                await asyncio.wait({getter, killed}, return_when=asyncio.FIRST_COMPLETED)
                if self.kill.is_set():
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "killed")
                event = getter.result()
                if event is None:
                    return
                yield pb.GenerateEvents(events=[event])
        finally:
            for task in (reader, killed, *tasks):
                task.cancel()

    async def _events(self, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateEvent]:
        began = time.monotonic()
        name, sampling = request.request_id, request.sampling
        sent = self.sent[name]
        sent.arrived.append(began)
        sent.requests.append(request)
        plan = Script(**json.loads(request.tenant)) if request.tenant.startswith("{") else self.default
        if name in self.live:
            raise _Failed("ALREADY_EXISTS", f"{name} is live")
        if request.text == "bad":
            raise _Failed("INVALID_ARGUMENT", "prompt: bad", field="prompt")
        if request.expected_fingerprint and request.expected_fingerprint != self.fingerprint:
            raise _Failed("FAILED_PRECONDITION", f"this server's fingerprint is {self.fingerprint}")
        if self.refused[name] < plan.refuse:
            self.refused[name] += 1
            raise _Failed("RESOURCE_EXHAUSTED", "the queue is full", retry_after=plan.retry_after)
        self.live.add(name)
        try:
            async for event in self._choices(request, plan, sent, began, max(1, sampling.n or 1)):
                yield event
        finally:
            self.live.discard(name)

    async def _choices(
        self, request: pb.GenerateRequest, plan: Script, sent: Sent, began: float, n: int
    ) -> AsyncIterator[pb.GenerateEvent]:
        limit = request.sampling.max_tokens if request.sampling.HasField("max_tokens") else 8
        total = limit if plan.tokens < 0 else plan.tokens
        length = len(request.token_ids.ids) or len(request.text) or len(request.chat.messages)
        held = [len(choice.token_ids) for choice in request.resume.choices] or [0] * n
        skipped = min(held)
        if plan.empty_first:
            yield pb.GenerateEvent()
        fingerprint = pb.Fingerprint(digest=self.fingerprint, parts={"mock": self.fingerprint})
        seed = request.resume.seed if request.HasField("resume") else (request.sampling.seed or 7)
        started = pb.Started(request_id=request.request_id, seed=seed, fingerprint=fingerprint, prompt_tokens=length)
        position = skipped
        while position < total:
            count = min(plan.per_message, total - position)
            due = plan.ttft + plan.gap * ((position - skipped) // plan.per_message)
            due += plan.stall if 0 <= plan.stall_at <= position else 0.0
            await self._until(began + due)
            if 0 <= plan.fail_at <= position and not request.HasField("resume"):
                raise _Failed(plan.fail_code, "as the script says")
            for choice in range(n):
                ids = [(length + choice + at) % 1000 for at in range(max(position, held[choice]), position + count)]
                event = pb.GenerateEvent(index=choice, token_ids=ids, text="".join(f"{one} " for one in ids))
                if request.sampling.HasField("logprobs"):
                    event.logprobs.extend(float("-inf") if one % 2 else -0.5 for one in ids)
                if position == skipped and choice == 0:
                    event.started.CopyFrom(started)
                if position + count == total:
                    event.finish.reason = pb.FINISH_REASON_ABORT if plan.aborted else pb.FINISH_REASON_LENGTH
                    if choice == n - 1:
                        event.usage.prompt_tokens, event.usage.completion_tokens = length, total * n
                sent.times.append(time.monotonic())
                sent.counts.append(len(ids))
                self.tokens += len(ids)
                yield event
            position += count
        if skipped >= total:
            for choice in range(n):
                event = pb.GenerateEvent(index=choice, finish=pb.Finish(reason=pb.FINISH_REASON_LENGTH))
                if choice == 0:
                    event.started.CopyFrom(started)
                if choice == n - 1:
                    event.usage.prompt_tokens, event.usage.completion_tokens = length, total * n
                yield event

    async def _until(self, when: float) -> None:
        if self.kill.is_set():
            raise _Failed("UNAVAILABLE", "killed")
        try:
            await asyncio.wait_for(self.kill.wait(), max(0.0, when - time.monotonic()))
        except TimeoutError:
            return
        raise _Failed("UNAVAILABLE", "killed")

    async def GetModelInfo(self, request: Any, context: Any) -> pb.ModelInfo:
        del request, context
        return pb.ModelInfo(
            model="mock", vocab_size=50_000, max_seq_len=4096, fingerprint=pb.Fingerprint(digest=self.fingerprint)
        )

    async def Stats(self, request: Any, context: Any) -> pb.StatsReply:
        del request, context
        return pb.StatsReply(values={"generation_tokens_total": float(self.tokens)}, state="serving")

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortReply:
        del context
        return pb.AbortReply(aborted=[name for name in request.request_ids if name in self.live])


class _Failed(Exception):
    def __init__(self, code: str, message: str, field: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status_pb2.Status(code=code_pb2.Code.Value(code), message=message)
        if field:
            bad = error_details_pb2.BadRequest(
                field_violations=[error_details_pb2.BadRequest.FieldViolation(field=field, description=message)]
            )
            self._pack(bad)
        if retry_after is not None:
            delay = duration_pb2.Duration()
            delay.FromMicroseconds(int(retry_after * 1e6))
            self._pack(error_details_pb2.RetryInfo(retry_delay=delay))

    def _pack(self, detail: Any) -> None:
        packed = any_pb2.Any()
        packed.Pack(detail)
        self.status.details.append(packed)


class MockServer:
    """The servicer on a port of its own, in a thread of this process."""

    def __init__(self, fingerprint: str = "mock", address: str = "127.0.0.1:0") -> None:
        self.servicer: MockServicer
        self._fingerprint, self._wanted = fingerprint, address
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.servicer = MockServicer(self._fingerprint)
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        generation_pb2_grpc.add_GenerationServicer_to_server(self.servicer, server)
        self.health = health.aio.HealthServicer()
        await self.health.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        port = server.add_insecure_port(self._wanted)
        self.address = f"127.0.0.1:{port}"
        await server.start()
        self._ready.set()
        await self._stop.wait()
        await server.stop(None)

    @property
    def sent(self) -> dict[str, Sent]:
        return self.servicer.sent

    def kill_streams(self) -> None:
        """Every stream ends as UNAVAILABLE; new ones are served again."""

        async def act() -> None:
            self.servicer.kill.set()
            await asyncio.sleep(0.05)
            self.servicer.kill.clear()

        asyncio.run_coroutine_threadsafe(act(), self._loop).result(5)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(5)

    def __enter__(self) -> "MockServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
