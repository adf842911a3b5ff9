"""The stub to a group of workers: an Executor whose mathematics is elsewhere.

Knows the ranks' addresses, the stream of each and which steps are in flight. Does not know what a token is. Invariants:
every rank is sent the same bytes, a result leaves only when the digests of all ranks agree, in order; and whatever goes
wrong (a broken stream, a late step, a digest, a reply out of order) ends the epoch once, for all futures alike.

Errors: everything raises EpochLost, its text naming the rank and, where there is one, the step; CannotForm where a rank
says that the next group of these sizes would not form either.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import Message

from protos import codec, worker_pb2_grpc
from protos import worker_pb2 as pb
from protos.step import CannotForm, Description, EpochLost, Floats, GroupConfig, StepBatch, StepResult
from protos.worker_link import CANNOT_FORM_KEY, EPOCH_KEY, HOST_KEY, SECRET_KEY, LogitsReader, host_identity

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 3.0  # of calls that only ask
FORM_TIMEOUT_S = 30.0  # of joining, where nobody says otherwise: ranks meet, caches are allocated
CUDA_FORM_TIMEOUT_S = 120.0  # and the first time on a machine kernels are compiled, which takes up to 40 s
FORM_POLL_S = 0.1
LOADING_POLL_S = 0.1


@dataclass(frozen=True)
class _Rank:
    number: int
    address: str
    channel: grpc.Channel
    worker: worker_pb2_grpc.WorkerStub

    def lost(self, doing: str, error: grpc.RpcError) -> EpochLost:
        code, details = error.code(), error.details()
        trailing: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
        lasting = CANNOT_FORM_KEY in dict(trailing or ())
        kind = CannotForm if lasting else EpochLost
        return kind(f"rank {self.number} ({self.address}): {doing}: {code.name}: {details}")


class RemoteExecutor:
    """Args:
    addresses: host:port of each rank, rank 0 first.
    ready_timeout_s: how long `describe` waits for every rank to be reachable and loaded.
    form_timeout_s: how long a group may take to form; None: FORM_TIMEOUT_S, or CUDA_FORM_TIMEOUT_S where rank 0 is on
        a GPU. A rank that dies or freezes meanwhile is noticed as at any other time.
    secret: sent with every call; workers that were started with one refuse strangers.
    credentials: TLS towards the workers; None is plaintext.
    on_lost: called once, from any thread, when a joined epoch ends by itself, also while no step is in flight.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        ready_timeout_s: float = 600.0,
        form_timeout_s: float | None = None,
        secret: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        on_lost: Callable[[EpochLost], None] | None = None,
    ) -> None:
        self._ranks = [_connect(number, address, credentials) for number, address in enumerate(addresses)]
        self._ready_timeout_s = ready_timeout_s
        self._form_timeout_s = form_timeout_s
        self._metadata = ((SECRET_KEY, secret),) if secret is not None else ()
        self.on_lost = on_lost
        self._epoch: _Epoch | None = None
        self._facts: list[Description] = []  # of each rank, as last asked

    def describe(self) -> Description:
        """Rank 0's facts, once all ranks have loaded and agree; `epoch` is the highest that any of them has joined."""
        deadline = time.monotonic() + self._ready_timeout_s
        told = ""
        while True:
            try:
                return self._describe_ranks()
            except EpochLost as lost:
                if str(lost) != told:
                    told = str(lost)
                    logger.info("waiting for the workers: %s", told)
                if time.monotonic() > deadline:
                    raise EpochLost(f"the workers were not ready within {self._ready_timeout_s:g} s: {lost}") from lost
            time.sleep(LOADING_POLL_S)

    def join(self, config: GroupConfig) -> int:
        self.close()
        description = self._describe_ranks()
        if config.num_blocks == 0:
            config = replace(config, num_blocks=self._blocks_that_fit(config, description))
        on_gpu = description.device.startswith("cuda")
        timeout_s = self._form_timeout_s or (CUDA_FORM_TIMEOUT_S if on_gpu else FORM_TIMEOUT_S)
        deadline = time.monotonic() + timeout_s
        epoch = _Epoch(config, self._ranks, self._metadata, self._tell_lost)
        try:
            num_blocks = self._join_ranks(config, epoch, deadline)
            epoch.wait_accepted(deadline)
        except EpochLost as lost:
            epoch.end(str(lost), tell=False)
            raise
        self._epoch = epoch
        if epoch.ended is not None:  # before `_epoch` was set, so that nobody was told
            raise epoch.ended
        return num_blocks

    def step(self, batch: StepBatch) -> Future[StepResult]:
        if self._epoch is None:
            return _failed(EpochLost("no epoch is joined"))
        return self._epoch.step(batch)

    def close(self) -> None:
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            epoch.end("left", tell=False)

    def _tell_lost(self, epoch: "_Epoch", lost: EpochLost) -> None:
        if self.on_lost is not None and self._epoch is epoch:
            self.on_lost(lost)

    def _describe_ranks(self) -> Description:
        self._facts = [
            codec.decode_description(message)
            for message in self._ask("Describe", [pb.DescribeRequest()] * len(self._ranks))
        ]
        first = self._facts[0]
        for rank, facts in zip(self._ranks, self._facts):
            where = f"rank {rank.number} ({rank.address})"
            if (facts.rank, facts.tp) != (rank.number, len(self._ranks)):
                raise EpochLost(
                    f"{where} was started as rank {facts.rank} of {facts.tp}; {len(self._ranks)} are listed"
                )
            if not facts.ready:
                raise EpochLost(f"{where} is loading its weights")
            if dict(facts.fingerprint) != dict(first.fingerprint):
                raise EpochLost(f"{where} differs from rank 0 in {_differences(facts, first)}")
        return replace(first, epoch=max(facts.epoch for facts in self._facts))

    def _blocks_that_fit(self, config: GroupConfig, description: Description) -> int:
        """The pool that fits on the smallest rank, and no larger than every slot at its longest could use twice."""
        fits = min(facts.memory_bytes // max(1, facts.kv_bytes_per_token * config.block_size) for facts in self._facts)
        useful = 2 * config.max_num_seqs * -(-config.max_seq_len // config.block_size)
        return max(1, min(fits, useful))

    def _join_ranks(self, config: GroupConfig, epoch: "_Epoch", deadline: float) -> int:
        """Rank 0's stream is opened before the others join, so that its end is noticed while they look for it."""
        tp = len(self._ranks)
        (first,) = self._ask("Join", [codec.encode_join(config, 0, tp, "")], deadline - time.monotonic(), epoch)
        epoch.open(0)
        joins = [codec.encode_join(config, rank, tp, first.store_address) for rank in range(1, tp)]
        others = self._ask("Join", [None, *joins], deadline - time.monotonic(), epoch)
        for rank in range(1, tp):
            epoch.open(rank)
        return min(config.num_blocks, *(int(reply.num_blocks) for reply in (first, *others) if reply.num_blocks))

    def _ask(
        self,
        method: str,
        requests: Sequence[Message | None],
        timeout_s: float = CALL_TIMEOUT_S,
        epoch: "_Epoch | None" = None,
    ) -> list[Any]:
        """One call to each rank at once (a None request leaves its rank out); the replies in rank order.

        The first call to fail, or the end of `epoch`, ends all of them.
        """
        calls = [
            (rank, getattr(rank.worker, method).future(request, timeout=timeout_s, metadata=self._metadata))
            for rank, request in zip(self._ranks, requests)
            if request is not None
        ]
        done: SimpleQueue[tuple[_Rank, Any]] = SimpleQueue()
        for rank, call in calls:
            call.add_done_callback(lambda call, rank=rank: done.put((rank, call)))
        left = len(calls)
        try:
            while left:
                if epoch is not None and epoch.ended is not None:
                    raise epoch.ended
                try:
                    rank, call = done.get(timeout=FORM_POLL_S)
                except Empty:
                    continue
                try:
                    call.result()
                except grpc.RpcError as error:
                    raise rank.lost(method, error) from None
                left -= 1
            return [call.result() for _, call in calls]
        finally:
            for _, call in calls:
                call.cancel()


@dataclass(eq=False)
class _Step:
    batch: StepBatch
    future: Future[StepResult]
    sent: float
    digests: dict[int, int] = field(default_factory=dict)
    result: StepResult | None = None


class _Epoch:
    """The streams of one epoch and the steps in flight on them."""

    def __init__(
        self,
        config: GroupConfig,
        ranks: Sequence[_Rank],
        metadata: tuple[tuple[str, str], ...],
        on_lost: "Callable[[_Epoch, EpochLost], None]",
    ) -> None:
        self._config = config
        self._on_lost = on_lost
        self._lock = Lock()
        self.ended: EpochLost | None = None
        self._over = Event()
        self._steps: deque[_Step] = deque()  # oldest first
        self._answered = [0] * len(ranks)  # steps of `_steps` that the rank has answered
        self._head_since = 0.0  # when the oldest step became the oldest
        self._logits: list[bytes] = []  # pieces of the step that rank 0 answers next
        self._shared = LogitsReader()
        metadata = (*metadata, (EPOCH_KEY, str(config.epoch)), (HOST_KEY, host_identity()))
        self._streams = [_Stream(rank, self) for rank in ranks]
        self._metadata = metadata

    def open(self, rank: int) -> None:
        """The stream of a rank that has joined. Raises EpochLost."""
        with self._lock:  # so that whoever ends the epoch closes this stream too
            if self.ended is None:
                self._streams[rank].open(self._metadata)
        if self.ended is not None:
            raise self.ended

    def wait_accepted(self, deadline: float) -> None:
        """Returns when every rank has accepted its stream, which is when the group stands. Raises EpochLost."""
        for stream in self._streams:
            if not stream.accepted.wait(max(0.0, deadline - time.monotonic())):
                self.end(f"rank {stream.rank.number} did not take its stream in time", tell=False)
        if self.ended is not None:
            raise self.ended
        Thread(target=self._watch, name=f"watch-{self._config.epoch}", daemon=True).start()

    def step(self, batch: StepBatch) -> Future[StepResult]:
        data = codec.encode_request(batch).SerializeToString()
        step = _Step(batch, Future(), time.monotonic())
        with self._lock:
            if self.ended is not None:
                return _failed(self.ended)
            if not self._steps:
                self._head_since = step.sent
            self._steps.append(step)
            for stream in self._streams:
                stream.requests.put(data)
        return step.future

    def reply(self, rank: int, reply: pb.StepReply) -> None:
        """One message of one rank, in its stream's order."""
        try:
            kind = reply.WhichOneof("kind")
            if kind == "logits":
                piece = reply.logits
                self._logits.append(self._bytes_of(piece))
                return
            message = reply.result if kind == "result" else reply.digest
            if (kind == "result") != (rank == 0):
                raise codec.CodecError(f"a {kind} from rank {rank}")
            result = self._result(reply.result) if kind == "result" else None
            self._answer(rank, message.epoch, message.seq, message.digest, result)
        except ValueError as error:  # CodecError, or shared memory that is not there
            self.end(f"rank {rank}: {error}")

    def _bytes_of(self, piece: pb.LogitsPiece) -> bytes:
        if piece.shared_memory:
            return self._shared.read(piece.shared_memory, piece.offset, piece.size)
        return piece.data

    def _result(self, message: pb.StepResult) -> StepResult:
        logits: Floats | None = None
        if message.logits_rows:
            if message.logits_dtype not in ("float32", "float64"):
                raise codec.CodecError(f"logits of type {message.logits_dtype!r}")
            flat: Floats = np.frombuffer(b"".join(self._logits), message.logits_dtype)
            if len(flat) % message.logits_rows:
                raise codec.CodecError(f"step {message.seq}: {len(flat)} logits in {message.logits_rows} rows")
            logits = flat.reshape(message.logits_rows, -1)
        self._logits.clear()
        return codec.decode_result(message, logits)

    def _answer(self, rank: int, epoch: int, seq: int, digest: int, result: StepResult | None) -> None:
        with self._lock:
            if self.ended is not None:
                return
            position = self._answered[rank]
            if position >= len(self._steps):
                raise codec.CodecError(f"an answer to step {seq}, which nobody asked for")
            step = self._steps[position]
            if (epoch, seq) != (self._config.epoch, step.batch.seq):
                raise codec.CodecError(f"an answer to step {epoch}:{seq} where step {step.batch.seq} is due")
            self._answered[rank] += 1
            step.digests[rank] = digest
            if result is not None:
                step.result = result
            if len(step.digests) < len(self._streams):
                return
            # each rank answers in order, so a step that all have answered is the oldest
            self._steps.popleft()
            self._answered = [count - 1 for count in self._answered]
            self._head_since = time.monotonic()
        if len(set(step.digests.values())) > 1:
            told = ", ".join(f"rank {rank} {digest:016x}" for rank, digest in sorted(step.digests.items()))
            lost = self.end(f"step {seq}: the ranks disagree about what they drew: {told}")
            step.future.set_exception(lost)
            return
        assert step.result is not None
        step.future.set_result(step.result)

    def end(self, reason: str | EpochLost, *, tell: bool = True) -> EpochLost:
        """End the epoch: streams are cancelled (which ends it on the ranks) and every future fails. Idempotent."""
        with self._lock:
            if self.ended is not None:
                return self.ended
            kind = type(reason) if isinstance(reason, EpochLost) else EpochLost
            lost = self.ended = kind(f"epoch {self._config.epoch}: {reason}")
            steps = list(self._steps)
            self._steps.clear()
        self._over.set()
        if tell:
            at = f" with steps {steps[0].batch.seq}..{steps[-1].batch.seq} in flight" if steps else ""
            logger.error("epoch %d lost: %s%s", self._config.epoch, reason, at)
        for stream in self._streams:
            stream.close()
        for step in steps:
            step.future.set_exception(lost)
        if tell:
            self._on_lost(self, lost)
        return lost

    def _watch(self) -> None:
        """Ends the epoch when its oldest step is late."""
        limit = self._config.step_timeout_s
        while not self._over.wait(limit / 8):
            with self._lock:
                late = bool(self._steps) and time.monotonic() - self._head_since > limit
                missing = sorted(set(range(len(self._streams))) - set(self._steps[0].digests)) if late else []
                seq = self._steps[0].batch.seq if late else 0
            if late:
                self.end(f"step {seq}: no answer from ranks {missing} within {limit:g} s")


class _Stream:
    """One rank's stream: a queue of serialised steps out, a thread that reads replies in."""

    def __init__(self, rank: _Rank, epoch: _Epoch) -> None:
        self.rank = rank
        self.requests: SimpleQueue[bytes | None] = SimpleQueue()
        self.accepted = Event()
        self._epoch = epoch
        self._call: Any = None

    def open(self, metadata: tuple[tuple[str, str], ...]) -> None:
        # requests are serialised once for all ranks, hence no serialiser here
        steps = self.rank.channel.stream_stream(
            "/lockstep.v1.Worker/Steps", request_serializer=None, response_deserializer=pb.StepReply.FromString
        )
        self._call = steps(iter(self.requests.get, None), metadata=metadata)
        Thread(target=self._read, name=f"rank-{self.rank.number}", daemon=True).start()

    def close(self) -> None:
        self.requests.put(None)
        if self._call is not None:
            self._call.cancel()

    def _read(self) -> None:
        try:
            self._call.initial_metadata()  # blocks until the rank has taken the stream or refused it
            if self._call.is_active():
                self.accepted.set()
            for reply in self._call:
                self._epoch.reply(self.rank.number, reply)
            self._epoch.end(f"rank {self.rank.number} ({self.rank.address}) ended its stream")
        except grpc.RpcError as error:
            self._epoch.end(self.rank.lost("Steps", error))
        except Exception as error:  # a reader that dies unseen would leave its steps to the deadline
            logger.exception("rank %d: reading replies", self.rank.number)
            self._epoch.end(f"rank {self.rank.number}: {error!r}")
        finally:
            self.accepted.set()


def _connect(number: int, address: str, credentials: grpc.ChannelCredentials | None) -> _Rank:
    options = codec.WORKER_CHANNEL_OPTIONS
    channel = (
        grpc.secure_channel(address, credentials, options)
        if credentials is not None
        else grpc.insecure_channel(address, options)
    )
    return _Rank(number, address, channel, worker_pb2_grpc.WorkerStub(channel))  # type: ignore[no-untyped-call]


def _differences(facts: Description, other: Description) -> str:
    keys = sorted(
        key
        for key in {*facts.fingerprint, *other.fingerprint}
        if facts.fingerprint.get(key) != other.fingerprint.get(key)
    )
    return ", ".join(f"{key} ({facts.fingerprint.get(key)!r}, {other.fingerprint.get(key)!r})" for key in keys)


def _failed(error: EpochLost) -> Future[StepResult]:
    future: Future[StepResult] = Future()
    future.set_exception(error)
    return future
