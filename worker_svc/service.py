"""The worker's gRPC service: a servicer in front of the engine.

Knows the state of this rank (loading, ready, joined), the epoch it is in and the one stream that may step it. Does not
know models. Invariants: an epoch number is joined at most once, a stream steps only the epoch it names, and a stream
that ends takes its epoch with it, so that a scheduler that is gone leaves nothing running here.

Synchronous gRPC on purpose: one stream, whose handler thread waits for results while another thread feeds batches,
is as quick as an event loop, and health stays answerable during a long step.

A refused call: UNAUTHENTICATED (wrong secret), UNAVAILABLE (loading), FAILED_PRECONDITION (stale epoch, wrong rank),
INVALID_ARGUMENT (no message of this kind, columns that contradict each other), ABORTED (the epoch was lost). For a
group that would not form next time either, with CANNOT_FORM_KEY: RESOURCE_EXHAUSTED (memory), INVALID_ARGUMENT (sizes)
and INTERNAL. How long forming may take is the caller's to say, by its deadline or by leaving.
"""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import NoReturn, Protocol

import grpc
import numpy as np

from protos import codec, worker_pb2_grpc
from protos import worker_pb2 as pb
from protos.malformed import Malformed
from protos.step import Description, EpochLost, GroupConfig, StepResult
from protos.worker_link import (
    CANNOT_FORM_KEY,
    EPOCH_KEY,
    HOST_KEY,
    SHARED_FROM_BYTES,
    LogitsSegment,
    host_identity,
)
from worker_svc.engine import LocalExecutor
from worker_svc.join_failures import JoinFailure, failure_of, is_memory, text_of
from worker_svc.parallel.group import Group

logger = logging.getLogger(__name__)

FORM_POLL_S = 0.25  # how late a caller that has gone is noticed while the group forms
MAX_EPOCH_STEP = 1 << 20  # between epochs that follow each other, so that no caller uses the numbers up
MAX_CACHE_BYTES = 1 << 40  # beyond which no device's memory goes


class Rendezvous(Protocol):
    """One rank's part in forming a group."""

    @property
    def address(self) -> str:
        """Of the store, host:port."""
        ...

    def form(self) -> Group:
        """Wait for the other ranks, within the step timeout."""
        ...


# (config, store address or "" to host the store) -> this rank's rendezvous
OpenRendezvous = Callable[[GroupConfig, str], Rendezvous]


class _Joined:
    """An epoch as the service sees it: a group that forms, then one stream."""

    def __init__(self, config: GroupConfig) -> None:
        self.config = config
        self.epoch = config.epoch
        self.formed = Event()
        self.num_blocks = 0
        self.error: str | None = None
        self.code = grpc.StatusCode.ABORTED
        self.lasting = False  # the next group would not form either
        self.claimed = False


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Args:
    rank, tp: what this worker was started as.
    loading: what Describe answers until `ready` is called.
    on_broken: told why only another process could form a group on this rank's device.
    """

    def __init__(
        self,
        rank: int,
        tp: int,
        loading: pb.Description,
        open_rendezvous: OpenRendezvous,
        on_broken: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._rank = rank
        self._tp = tp
        self._loading = loading
        self._open_rendezvous = open_rendezvous
        self._on_broken = on_broken
        self._executor: LocalExecutor | None = None
        self._lock = Lock()
        self._last_epoch = 0
        self._joined: _Joined | None = None

    def ready(self, executor: LocalExecutor) -> None:
        """The weights are loaded."""
        self._executor = executor

    def close(self) -> None:
        """End the epoch, if any; the ranks that share it notice."""
        self._joined = None
        if self._executor is not None:
            self._executor.close()

    def Describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.Description:
        if self._executor is None:
            return self._loading
        description = codec.encode_description(self._executor.describe())
        description.epoch = self._last_epoch
        return description

    def Join(self, request: pb.JoinRequest, context: grpc.ServicerContext) -> pb.JoinReply:
        executor = self._executor
        if executor is None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the worker is loading its weights")
        config = codec.decode_join(request)
        if wrong := _out_of_bounds(config, executor.describe()):
            context.set_trailing_metadata(((CANNOT_FORM_KEY, "1"),))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, wrong)
        with self._lock:
            if (request.rank, request.tp) != (self._rank, self._tp):
                _refuse(
                    context,
                    f"this worker is rank {self._rank} of {self._tp}, not rank {request.rank} of {request.tp}",
                )
            if config.epoch <= self._last_epoch:
                _refuse(context, f"epoch {config.epoch} is stale: epoch {self._last_epoch} was joined")
            if config.epoch > self._last_epoch + MAX_EPOCH_STEP:
                _refuse(context, f"epoch {config.epoch} is beyond what can follow epoch {self._last_epoch}")
            self._last_epoch = config.epoch
            executor.end()
            joined = self._joined = _Joined(config)
            if self._rank and not request.store_address:
                _refuse(context, "a rank other than 0 needs the address of the store")
            try:
                rendezvous = self._open_rendezvous(config, request.store_address)
            except (OSError, RuntimeError, ValueError) as error:
                context.abort(grpc.StatusCode.ABORTED, f"rank {self._rank}: no rendezvous: {error}")

        def form() -> None:
            try:
                joined.num_blocks = executor.join(config, rendezvous.form())
                if self._joined is not joined:  # ended or overtaken while it formed
                    executor.leave(config.epoch)
                    joined.error = f"epoch {config.epoch} was left before it stood"
            except Exception as error:  # peers that do not come, memory that is not there
                self._note(joined, error)
            joined.formed.set()

        forming = Thread(target=form, name=f"form-{config.epoch}", daemon=True)
        forming.start()
        if self._rank or self._tp == 1:
            self._wait_formed(joined, context)
        return pb.JoinReply(store_address=rendezvous.address, num_blocks=joined.num_blocks)

    def Steps(
        self, request_iterator: Iterator[pb.StepRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.StepReply]:
        joined = self._claim(context)
        executor = self._executor
        assert executor is not None
        # also when the scheduler goes away in the middle of a step, which then hangs in nobody's collective
        if not context.add_callback(lambda: self._end(joined)):
            self._end(joined)
        self._wait_formed(joined, context)
        context.send_initial_metadata(())  # tells the scheduler that this rank stands
        shared = self._shared(joined, context)
        answers: SimpleQueue[Future[StepResult] | codec.CodecError | Malformed | None] = SimpleQueue()

        def feed() -> None:
            try:
                for request in request_iterator:
                    answers.put(executor.step(codec.decode_batch(request.batch)))
            except (codec.CodecError, Malformed) as error:
                answers.put(error)
            except Exception as error:  # grpc raises a bare Exception when the peer is gone
                logger.debug("rank %d: stream of epoch %d: %s", self._rank, joined.epoch, error)
            answers.put(None)

        Thread(target=feed, name=f"feed-{joined.epoch}", daemon=True).start()
        try:
            while (answer := answers.get()) is not None:
                if isinstance(answer, (codec.CodecError, Malformed)):
                    context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(answer))
                yield from self._replies(answer.result(), shared)
        except EpochLost as lost:
            context.abort(grpc.StatusCode.ABORTED, f"rank {self._rank}: {lost}")
        finally:
            if shared is not None:
                shared.close()

    def Leave(self, request: pb.LeaveRequest, context: grpc.ServicerContext) -> pb.LeaveReply:
        joined = self._joined
        if joined is not None and joined.epoch == request.epoch:
            self._end(joined)
        return pb.LeaveReply()

    def _end(self, joined: _Joined) -> None:
        with self._lock:
            if self._joined is joined:
                self._joined = None
        if self._executor is not None:
            self._executor.leave(joined.epoch)

    def _claim(self, context: grpc.ServicerContext) -> _Joined:
        text = _metadata(context, EPOCH_KEY)
        with self._lock:
            joined = self._joined
            if joined is None or text != str(joined.epoch):
                _refuse(context, f"epoch {text or 'unnamed'} is not joined here (last: {self._last_epoch})")
            if joined.claimed:
                _refuse(context, f"epoch {text} has its stream already")
            joined.claimed = True
        return joined

    def _wait_formed(self, joined: _Joined, context: grpc.ServicerContext) -> None:
        while not joined.formed.wait(FORM_POLL_S):
            if not context.is_active():
                context.abort(grpc.StatusCode.ABORTED, f"rank {self._rank}: nobody waits for epoch {joined.epoch}")
        if joined.error is not None:
            if joined.lasting:
                context.set_trailing_metadata(((CANNOT_FORM_KEY, "1"),))
            context.abort(joined.code, joined.error)

    def _note(self, joined: _Joined, error: Exception) -> None:
        """Why the group did not form."""
        failure = failure_of(error, self._tp)
        known = failure is JoinFailure.PEERS or is_memory(error) or isinstance(error, ValueError)
        logger.warning(
            "rank %d: epoch %d did not form: %s", self._rank, joined.epoch, text_of(error), exc_info=not known
        )
        joined.error = f"rank {self._rank}: the group did not form: {text_of(error)}"
        joined.lasting = failure is JoinFailure.LASTING
        if joined.lasting:
            is_size = isinstance(error, ValueError)
            other = grpc.StatusCode.INVALID_ARGUMENT if is_size else grpc.StatusCode.INTERNAL
            joined.code = grpc.StatusCode.RESOURCE_EXHAUSTED if is_memory(error) else other
        elif failure is JoinFailure.DEVICE:
            self._on_broken(joined.error)

    def _shared(self, joined: _Joined, context: grpc.ServicerContext) -> LogitsSegment | None:
        """Memory for this stream's logits, if the scheduler can open it."""
        identity = host_identity()
        if self._rank or not identity or _metadata(context, HOST_KEY) != identity:
            return None
        assert self._executor is not None
        row_bytes = 8 * self._executor.describe().vocab_size  # float64 is the widest
        try:
            return LogitsSegment(row_bytes * joined.config.max_num_seqs, joined.config.pipeline_depth)
        except OSError as error:
            logger.warning("no shared memory for logits, they go through gRPC: %s", error)
            return None

    def _replies(self, result: StepResult, shared: LogitsSegment | None) -> Iterator[pb.StepReply]:
        if self._rank:
            yield pb.StepReply(digest=pb.StepDigest(epoch=result.epoch, seq=result.seq, digest=result.digest))
            return
        if result.logits is not None and shared is not None and result.logits.nbytes >= SHARED_FROM_BYTES:
            yield pb.StepReply(
                logits=pb.LogitsPiece(
                    epoch=result.epoch,
                    seq=result.seq,
                    offset=shared.write(result.logits),
                    shared_memory=shared.name,
                    size=result.logits.nbytes,
                )
            )
        elif result.logits is not None:
            data = np.ascontiguousarray(result.logits).reshape(-1).view(np.uint8)
            for offset in range(0, len(data), codec.LOGITS_PIECE_BYTES):
                piece = data[offset : offset + codec.LOGITS_PIECE_BYTES].tobytes()
                yield pb.StepReply(
                    logits=pb.LogitsPiece(
                        epoch=result.epoch, seq=result.seq, offset=offset, data=piece, size=len(piece)
                    )
                )
        yield codec.encode_reply(result)


def _out_of_bounds(config: GroupConfig, facts: Description) -> str:
    """What of a group's sizes no scheduler of ours asks for; "" for nothing."""
    bounds = {
        "block_size": (config.block_size, 1, 1024),
        "max_num_seqs": (config.max_num_seqs, 1, 1 << 16),
        "max_batch_tokens": (config.max_batch_tokens, 1, 1 << 20),
        "max_seq_len": (config.max_seq_len, 1, facts.max_position_embeddings),
        "pipeline_depth": (config.pipeline_depth, 1, 16),
        "step_timeout_ms": (config.step_timeout_s * 1000, 1, 24 * 3600 * 1000),
        "num_blocks": (config.num_blocks * config.block_size * facts.kv_bytes_per_token, 0, MAX_CACHE_BYTES),
    }
    wrong = [f"{name} is out of bounds" for name, (value, low, high) in bounds.items() if not low <= value <= high]
    return "; ".join(wrong)


def _metadata(context: grpc.ServicerContext, key: str) -> str:
    value = dict(context.invocation_metadata()).get(key, "")
    return value if isinstance(value, str) else value.decode(errors="replace")


def _refuse(context: grpc.ServicerContext, message: str) -> NoReturn:
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
