"""The public gRPC service in front of the front end: one coroutine a call, no decision of its own.

Knows deadlines, disconnects and how a status travels. The rules of fields are validation.py's, those of requests
front_end.py's. Invariants: a call that ends for whatever reason leaves no live request behind; nothing is written
before the first token.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import grpc
from google.rpc import code_pb2
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health as grpc_health
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc
from protos.step import Int32s
from scheduler_svc import limits, statuses
from scheduler_svc.front_end import Failure, FrontEnd
from scheduler_svc.messages import EngineState
from scheduler_svc.readers import ManyReader, OneReader, Pace, Reader
from scheduler_svc.streams import Stream
from scheduler_svc.validation import InvalidRequest, Violation, identity, prompt_ids

logger = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Generation"].full_name
LONG_TEXT_BYTES = 8 << 10  # from here tokenizing leaves the event loop
STATS_TIMEOUT_S = 2.0

Context = Any  # grpc.aio.ServicerContext, generic in ways that add nothing here


class GenerationService(generation_pb2_grpc.GenerationServicer):
    """`own_stats` gives the figures that the front end counts; the engine's are asked for."""

    def __init__(self, front: FrontEnd, own_stats: Callable[[], Mapping[str, float]]) -> None:
        self._front = front
        self._own_stats = own_stats
        self._pace = Pace()
        self._tokenizing = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        self._watching: asyncio.Task[None] | None = None

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        reader = OneReader()
        request_id = request.request_id if request.HasField("request_id") else uuid.uuid4().hex
        try:
            stream = await self._admit(request, request_id, context, reader)
        except Failure as failure:
            await _abort(context, failure.status)
        reader.stream = stream
        try:
            with self._reading(reader):
                while not (stream.done and not stream.has_news()):
                    await reader.wait()
                    for event in stream.take():
                        await reader.write(context.write(event))
                    await self._rest(stream)
        except asyncio.CancelledError:
            if not reader.stalled:
                raise
            _uncancel()
            self._front.fail(stream, _stall_status())
        finally:
            self._front.cancel(stream)
        if stream.failure is not None:
            await _abort(context, stream.failure)

    async def GenerateMany(self, requests: AsyncIterator[pb.ClientMessage], context: Context) -> None:
        reader = ManyReader()
        taking = asyncio.create_task(self._take_requests(requests, context, reader))
        try:
            with self._reading(reader):
                while not reader.is_over():
                    await reader.wait()
                    for message in reader.take():
                        await reader.write(context.write(message))
        except asyncio.CancelledError:
            if not reader.stalled:
                raise
            _uncancel()
            await _abort(context, _stall_status())
        finally:
            taking.cancel()
            for stream in list(reader.live.values()):
                self._front.cancel(stream)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortReply:
        return pb.AbortReply(aborted=self._front.abort(request.request_ids))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.ModelInfo:
        engine, facts = self._front.engine, self._front.facts
        if engine is None or facts is None:
            await _abort(context, statuses.unavailable(f"the scheduler is starting: {self._front.reason}"))
        description = engine.description
        return pb.ModelInfo(
            model=description.model,
            model_path=description.model_path,
            vocab_size=description.vocab_size,
            max_seq_len=engine.max_seq_len,
            eos_token_ids=sorted(facts.eos_ids),
            bos_token_id=description.bos_token_id,
            dtype=description.dtype,
            tp=description.tp,
            block_size=engine.block_size,
            num_blocks=engine.num_blocks,
            max_num_seqs=engine.max_num_seqs,
            max_batch_tokens=engine.max_batch_tokens,
            fingerprint=self._front.fingerprint,
        )

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsReply:
        values: asyncio.Future[Mapping[str, float]] = asyncio.get_running_loop().create_future()
        self._front.ask_stats(lambda found: None if values.done() else values.set_result(found))
        try:
            found = await asyncio.wait_for(values, STATS_TIMEOUT_S)
        except TimeoutError:
            await _abort(context, statuses.unavailable("the engine does not answer"))
        return pb.StatsReply(values={**self._own_stats(), **found}, state=self._front.shown_state.value)

    # What the calls share

    async def _admit(
        self, request: pb.GenerateRequest, request_id: str, context: Context, reader: OneReader | ManyReader
    ) -> Stream:
        """Raises Failure."""
        arrival = time.monotonic()
        remaining = context.time_remaining()
        try:
            self._front.check_open()
            prompt = await self._prompt(request)
            return self._front.open(
                request,
                prompt,
                request_id,
                reader,
                arrival=arrival,
                deadline=None if remaining is None else arrival + remaining,
            )
        except Failure as failure:
            self._front.refused(failure.status)
            raise

    async def _prompt(self, request: pb.GenerateRequest) -> Int32s:
        facts = self._front.check_open()
        try:
            kind = request.WhichOneof("prompt")
            if kind in ("text", "chat") and request.ByteSize() > LONG_TEXT_BYTES:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._tokenizing, prompt_ids, request, facts)
            return prompt_ids(request, facts)
        except InvalidRequest as error:
            raise Failure(statuses.of_error(error)) from error

    async def _take_requests(
        self, requests: AsyncIterator[pb.ClientMessage], context: Context, reader: ManyReader
    ) -> None:
        try:
            async for message in requests:
                await self._take_request(message, context, reader)
        finally:
            reader.close_requests()

    async def _take_request(self, message: pb.ClientMessage, context: Context, reader: ManyReader) -> None:
        if message.WhichOneof("kind") == "cancel":
            if message.cancel in reader.live:
                self._front.abort([message.cancel])
            return
        request = message.request
        violations: list[Violation] = []
        identity(request, violations)
        if not request.HasField("request_id"):
            violations.append(Violation("request_id", "is required in GenerateMany"))
        if violations:
            reader.refuse(request.request_id, statuses.invalid(violations))
            return
        try:
            stream = await self._admit(request, request.request_id, context, reader)
        except Failure as failure:
            reader.refuse(request.request_id, failure.status)
        else:
            reader.add(stream)

    @contextlib.contextmanager
    def _reading(self, reader: Reader) -> Any:
        self._pace.add(reader)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            self._pace.remove(reader)

    async def _rest(self, stream: Stream) -> None:
        interval = self._pace.interval_s()
        if interval and not stream.done:
            await asyncio.sleep(interval)

    async def _watch(self) -> None:
        """Only while somebody reads: an idle server has nothing to wake up for."""
        while self._pace.is_used():
            await asyncio.sleep(1.0)
            self._pace.break_off_stalled(time.monotonic())


class Health:
    """grpc.health.v1 for the whole server and for the service, following the engine's real state."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front
        self.servicer = grpc_health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._tasks: set[asyncio.Task[None]] = set()

    def update(self) -> None:
        task = asyncio.get_running_loop().create_task(self.set())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def set(self) -> None:
        states = health_pb2.HealthCheckResponse
        serving = self._front.shown_state is EngineState.SERVING
        for name in ("", SERVICE_NAME):
            await self.servicer.set(name, states.SERVING if serving else states.NOT_SERVING)


def add_services(server: grpc.aio.Server, service: GenerationService, health_service: Health) -> None:
    generation_pb2_grpc.add_GenerationServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(health_service.servicer, server)
    names = (SERVICE_NAME, grpc_health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)


def _stall_status() -> Status:
    return statuses.status(code_pb2.RESOURCE_EXHAUSTED, f"the reader took no message for {limits.STALL_SECONDS:g} s")


def _uncancel() -> None:
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()


async def _abort(context: Context, status: Status) -> NoReturn:
    await context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status raises")
