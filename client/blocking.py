"""The blocking client: Lockstep.

Knows sync gRPC calls and threads; what to send, what arrived and when to give up is in run.py, batch.py and retry.py.
Invariant: leaving a stream in any way (break, exception, close) cancels its call, and the server frees the request.
"""

import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Unpack

import grpc

from client.batch import Batch, Outcome
from client.channel import DEFAULT_ADDRESS, Channels, Metadata, Tls, call_metadata, open_sync
from client.errors import Failure, LockstepError, failure_of_call
from client.requests import Chat, Options, Prompt, build
from client.results import Completion, Delta
from client.retry import Patience, RetryPolicy
from client.run import Run
from client.traces import trace_metadata
from protos import generation_pb2 as pb
from protos import generation_pb2_grpc

ENDED_EARLY = Failure("UNAVAILABLE", "the stream ended before the answer did")


class Stream(Iterator[Delta]):
    """Deltas as they arrive. Leaving the loop cancels the request; `completion` is what has arrived."""

    def __init__(self, run: Run, deltas: Iterator[Delta]) -> None:
        self._run = run
        self._deltas: Any = deltas

    def __next__(self) -> Delta:
        return next(self._deltas)  # type: ignore[no-any-return]

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the request, if it still runs."""
        self._deltas.close()

    @property
    def request_id(self) -> str:
        return self._run.request_id

    @property
    def completion(self) -> Completion:
        return self._run.completion()


class Lockstep:
    """A client of one scheduler, or of several that serve the same model (`addresses`: "a:1,b:1" or a sequence).

    Args:
        token: sent as a bearer token. tls: None is plaintext.
        retry: how a lost connection is met; streams are resumed with the same bits.

    Thread-safe. Use it as a context manager, or close it.
    """

    def __init__(
        self,
        addresses: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        token: str | None = None,
        tls: Tls | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._channels = Channels(addresses, open_sync, tls)
        self._metadata = call_metadata(token)
        self.retry = retry or RetryPolicy()

    def __enter__(self) -> "Lockstep":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection."""
        for channel in self._channels.opened():
            channel.close()

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer. Raises LockstepError."""
        return self.complete(build(prompt, **options))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """The answer as it comes. Raises LockstepError from the loop."""
        return self.stream_request(build(prompt, **options))

    def chat(self, messages: Sequence[dict[str, str]], **options: Unpack[Options]) -> Completion:
        """The whole answer to a conversation."""
        return self.generate(Chat(messages), **options)

    def batch(
        self, prompts: Iterable[Prompt | pb.GenerateRequest], *, window: int = 256, **options: Unpack[Options]
    ) -> list[Outcome]:
        """Every answer, in the order of the prompts; an error takes its own request's place and no other's."""
        outcomes: dict[int, Outcome] = {}
        for index, outcome in self.batch_stream(prompts, window=window, **options):
            if not isinstance(outcome, Delta):
                outcomes[index] = outcome
        return [outcomes[index] for index in sorted(outcomes)]

    def batch_stream(
        self, prompts: Iterable[Prompt | pb.GenerateRequest], *, window: int = 256, **options: Unpack[Options]
    ) -> Iterator[tuple[int, Delta | Outcome]]:
        """(index of the prompt, delta) as they come, and (index, Completion or LockstepError) once for each."""
        now = time.monotonic()
        runs = [
            self._run(one if isinstance(one, pb.GenerateRequest) else build(one, **options), now) for one in prompts
        ]
        return self._many(Batch(runs, window, random.random), self._of_request())

    def complete(self, request: pb.GenerateRequest) -> Completion:
        """The whole answer to a request that is already in the wire's form."""
        stream = self.stream_request(request)
        for _ in stream:
            pass
        return stream.completion

    def stream_request(self, request: pb.GenerateRequest) -> Stream:
        """The same as it comes."""
        run = self._run(request, time.monotonic())
        return Stream(run, self._one(run, self._of_request()))

    def abort(self, *request_ids: str) -> list[str]:
        """Ends requests, whoever made them; those that were live."""
        reply = self._unary("Abort", pb.AbortRequest(request_ids=request_ids))
        return list(reply.aborted)

    def info(self) -> pb.ModelInfo:
        """The model and the limits of the server."""
        reply: pb.ModelInfo = self._unary("GetModelInfo", pb.GetModelInfoRequest())
        return reply

    def stats(self) -> pb.StatsReply:
        """Counters and gauges, once."""
        reply: pb.StatsReply = self._unary("Stats", pb.StatsRequest())
        return reply

    def _run(self, request: pb.GenerateRequest, now: float) -> Run:
        return Run(request, self.retry, now, len(self._channels.addresses))

    def _of_request(self) -> Metadata:
        """Metadata of a request and of its repetitions, whoever drives the loop that reads it."""
        return (*self._metadata, *trace_metadata())

    def _stub(self) -> Any:
        return generation_pb2_grpc.GenerationStub(self._channels.current())  # type: ignore[no-untyped-call]

    def _one(self, run: Run, metadata: Metadata) -> Iterator[Delta]:
        while True:
            address, now = self._channels.address, time.monotonic()
            call = self._stub().Generate(run.message(now), timeout=run.remaining_s(now), metadata=metadata)
            try:
                for event in call:
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
            time.sleep(run.failed(failure, time.monotonic(), random.random()))

    def _many(self, batch: Batch, metadata: Metadata) -> Iterator[tuple[int, Delta | Outcome]]:
        while True:
            address, sender = self._channels.address, _Sender(batch)
            if batch.done:
                return
            call = self._stub().GenerateMany(iter(sender), metadata=metadata)
            try:
                for message in call:
                    for event in message.events:
                        with sender.lock:
                            news = list(batch.feed(event, time.monotonic()))
                        yield from news
                    sender.wake()
                failure = ENDED_EARLY
            except grpc.RpcError as error:
                failure = failure_of_call(error)
            finally:
                sender.stop()
                call.cancel()
            with sender.lock:
                batch.disconnected(failure, time.monotonic())
                news = list(batch.ended())
            yield from news
            if not batch.done:
                self._channels.failed(address)
                time.sleep(batch.wait_s(time.monotonic()) or 0.0)

    def _unary(self, method: str, request: Any) -> Any:
        patience = Patience(self.retry, time.monotonic())
        while True:
            address = self._channels.address
            try:
                return getattr(self._stub(), method)(request, timeout=30.0, metadata=self._metadata)
            except grpc.RpcError as error:
                failure = failure_of_call(error)
            self._channels.failed(address)
            wait = patience.wait_s(failure, 1, time.monotonic(), random.random())
            if wait is None:
                raise failure.error()
            time.sleep(wait)


class _Sender:
    """The request side of one GenerateMany stream: gRPC pulls from it in a thread of its own."""

    def __init__(self, batch: Batch) -> None:
        self.lock = threading.Lock()
        self._batch = batch
        self._changed = threading.Event()
        self._stopped = False

    def __iter__(self) -> Iterator[pb.ClientMessage]:
        while not self._stopped:
            self._changed.clear()
            with self.lock:
                now = time.monotonic()
                messages, wait, done = self._batch.ready(now), self._batch.wait_s(now), self._batch.done
            yield from messages
            if done:
                return  # half-closes: the server ends the stream
            self._changed.wait(wait)

    def wake(self) -> None:
        self._changed.set()

    def stop(self) -> None:
        self._stopped = True
        self._changed.set()


__all__ = ["Lockstep", "LockstepError", "Stream"]
