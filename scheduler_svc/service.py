"""The public gRPC service `lockstep.v1.Generation`, health and reflection: one coroutine a call, no decisions.

What the calls share is calls.py's. An error within GenerateMany is an event with a status and ends only its request;
bytes that are no message name no request, and end the stream.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import grpc
from grpc_health.v1 import health as grpc_health
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc
from protos.malformed import Malformed
from scheduler_svc import statuses
from scheduler_svc.calls import Calls, Context, abort, stall_status, uncancel
from scheduler_svc.front_end import Failure, FrontEnd
from scheduler_svc.messages import EngineState
from scheduler_svc.readers import ManyReader
from scheduler_svc.sampling_fields import Violation
from scheduler_svc.validation import identity

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Generation"].full_name
STATS_TIMEOUT_S = 2.0


class GenerationService(generation_pb2_grpc.GenerationServicer):
    """`own_stats` gives the figures that the front end counts; the engine's are asked for."""

    def __init__(self, calls: Calls, own_stats: Callable[[], Mapping[str, float]]) -> None:
        self._calls, self._front = calls, calls.front
        self._own_stats = own_stats

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        await self._calls.serve_one(request, context, context.write)

    async def GenerateMany(self, requests: AsyncIterator[pb.ClientMessage], context: Context) -> None:
        reader = ManyReader()
        taking = asyncio.create_task(self._take_requests(requests, context, reader))
        try:
            with self._calls.reading(reader):
                while not reader.is_over():
                    await reader.wait()
                    for message in reader.take():
                        await reader.write(context.write(message))
            if reader.malformed is not None:
                raise reader.malformed
        except asyncio.CancelledError:
            if not reader.stalled:
                raise
            uncancel()
            await abort(context, stall_status())
        finally:
            taking.cancel()
            for stream in list(reader.live.values()):
                self._front.cancel(stream)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortReply:
        return pb.AbortReply(aborted=self._front.abort(request.request_ids))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.ModelInfo:
        model = self._front.model
        if model is None:
            await abort(context, statuses.unavailable(f"the scheduler is starting: {self._front.reason}"))
        engine, description = model.engine, model.engine.description
        return pb.ModelInfo(
            model=description.model,
            model_path=description.model_path,
            vocab_size=description.vocab_size,
            max_seq_len=engine.max_seq_len,
            eos_token_ids=sorted(model.facts.eos_ids),
            bos_token_id=description.bos_token_id,
            dtype=description.dtype,
            tp=description.tp,
            block_size=engine.block_size,
            num_blocks=engine.num_blocks,
            max_num_seqs=engine.max_num_seqs,
            max_batch_tokens=engine.max_batch_tokens,
            fingerprint=model.fingerprint,
        )

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsReply:
        values: asyncio.Future[Mapping[str, float]] = asyncio.get_running_loop().create_future()
        self._front.ask_stats(lambda found: None if values.done() else values.set_result(found))
        try:
            found = await asyncio.wait_for(values, STATS_TIMEOUT_S)
        except TimeoutError:
            await abort(context, statuses.unavailable("the engine does not answer"))
        return pb.StatsReply(values={**self._own_stats(), **found}, state=self._front.shown_state.value)

    async def _take_requests(
        self, requests: AsyncIterator[pb.ClientMessage], context: Context, reader: ManyReader
    ) -> None:
        try:
            async for message in requests:
                await reader.has_room()
                await self._take_request(message, context, reader)
        except Malformed as error:
            reader.malformed = error  # where the stream is read and can be ended
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
            stream = await self._calls.admit(request, request.request_id, context, reader)
        except Failure as failure:
            reader.refuse(request.request_id, failure.status)
        else:
            reader.add(stream)


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


def add_services(
    server: grpc.aio.Server, service: GenerationService, health_service: Health, more_names: Sequence[str] = ()
) -> None:
    """`more_names`: services that others have added, for reflection."""
    generation_pb2_grpc.add_GenerationServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(health_service.servicer, server)
    names = (SERVICE_NAME, grpc_health.SERVICE_NAME, reflection.SERVICE_NAME, *more_names)
    reflection.enable_server_reflection(names, server)
