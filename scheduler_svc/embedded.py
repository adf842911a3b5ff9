"""`Engine`: the whole system in one process, for notebooks and scripts. The same loop, core, text and rules as the
services, with function calls where those have wires.

    with Engine("path/to/model") as engine:
        print(engine.generate("Once upon a time", max_tokens=20, seed=1).text)

Keyword arguments of `generate` and `stream` are the fields of SamplingParams; request fields (request_id, priority,
tenant, cache_salt, timeout_ms, expected_fingerprint) go the same way. One Engine may be used from many threads.
"""

import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self, overload

from google.rpc import code_pb2, error_details_pb2
from google.rpc.status_pb2 import Status

from protos import generation_pb2 as pb
from scheduler_svc.engine_config import EngineConfig
from scheduler_svc.engine_process import EngineStart, EngineThread
from scheduler_svc.executor import Executor
from scheduler_svc.front_end import Failure, FrontEnd
from scheduler_svc.messages import EngineState, Notice
from scheduler_svc.metrics import Metrics
from scheduler_svc.statuses import of_error
from scheduler_svc.streams import Stream
from scheduler_svc.validation import InvalidRequest, prompt_ids

REQUEST_FIELDS = ("request_id", "priority", "tenant", "cache_salt", "timeout_ms", "expected_fingerprint")
Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]


class RequestFailed(Exception):
    """A request was refused or did not end well. `code` is the gRPC code's name; `violations` name fields."""

    def __init__(self, status: Status) -> None:
        super().__init__(f"{code_pb2.Code.Name(status.code)}: {status.message}")
        self.code: str = code_pb2.Code.Name(status.code)
        self.message: str = status.message
        detail = error_details_pb2.BadRequest()
        self.violations: dict[str, str] = {
            violation.field: violation.description
            for any_detail in status.details
            if any_detail.Unpack(detail)
            for violation in detail.field_violations
        }


@dataclass(slots=True)
class Completion:
    """One choice. `alternatives` holds (token id, logprob) pairs for each token, `stop_reason` a string or an id."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)
    logits: bytes = b""
    finish_reason: str = ""
    stop_reason: str | int | None = None
    cumulative_logprob: float = 0.0


@dataclass(slots=True)
class Result:
    """A request's outcome; `text` and `token_ids` are those of choice 0."""

    request_id: str
    seed: int
    fingerprint: str
    choices: list[Completion]
    prompt_logprobs: list[float | None]
    usage: pb.Usage

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids


class Engine:
    """Args:
    model: a snapshot folder.
    dtype: float32, bfloat16 or float64; None: the checkpoint's.
    threads: CPU threads; None: all cores.
    sample_at, kv_blocks, block_size, max_num_seqs, max_batch_tokens, max_seq_len, max_queue, pipeline_depth,
    prefix_cache: as the flags of lockstep-scheduler.

    Raises RuntimeError when the model cannot be served, with the reason.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        device: str = "cpu",
        dtype: str | None = None,
        numerics: str = "invariant",
        threads: int | None = None,
        sample_at: str = "worker",
        kv_blocks: int = 0,
        block_size: int = 16,
        max_num_seqs: int = 64,
        max_batch_tokens: int = 512,
        max_seq_len: int = 0,
        max_queue: int = 1024,
        pipeline_depth: int = 2,
        prefix_cache: bool = True,
        _executor: Callable[[], Executor] | None = None,
    ) -> None:
        folder = Path(model)
        config = EngineConfig(
            block_size=block_size,
            num_blocks=kv_blocks,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            max_seq_len=max_seq_len,
            max_queue=max_queue,
            pipeline_depth=pipeline_depth,
            sample_at_scheduler=sample_at == "scheduler",
            prefix_cache=prefix_cache,
            recovery_timeout_s=1.0,
        )

        def load() -> Executor:
            return _load(folder, device, dtype, numerics, threads, config.sample_at_scheduler)

        self._lock = threading.RLock()
        self._metrics = Metrics()
        self._front = FrontEnd(lambda command: self._thread.send(command), self._metrics, folder)
        self._settled = threading.Event()
        self._front.on_state = self._on_state
        self._thread = EngineThread(EngineStart(config, _executor or load), self._handle, self._on_end)
        self._settled.wait()
        if self._front.state is not EngineState.SERVING:
            self.close()
            raise RuntimeError(self._front.reason)

    @overload
    def generate(self, prompt: Prompt | pb.GenerateRequest, **fields: Any) -> Result: ...

    @overload
    def generate(self, prompt: Sequence[Prompt], **fields: Any) -> list[Result]: ...

    def generate(self, prompt: Any, **fields: Any) -> Result | list[Result]:
        """Run one prompt, or a batch of them at once, to the end.

        Args:
            prompt: text, token ids, chat messages ({"role": .., "content": ..}), or a list of any of these.

        Raises:
            RequestFailed: of a batch, the first that failed; the others are cancelled.
        """
        if not _is_batch(prompt):
            with self.stream(prompt, **fields) as stream:
                return _collect(stream)
        streams = [self.stream(one, **fields) for one in prompt]
        try:
            return [_collect(stream) for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    def stream(self, prompt: Prompt | pb.GenerateRequest, **fields: Any) -> "EventStream":
        """The events of one request as they come. Leaving the loop and closing it cancels. Raises RequestFailed."""
        message = prompt if isinstance(prompt, pb.GenerateRequest) else request_of(prompt, **fields)
        return EventStream(self._front, self._lock, message)

    def stats(self) -> dict[str, float]:
        """Counters and gauges as the Prometheus endpoint names them."""
        answer: SimpleQueue[Mapping[str, float]] = SimpleQueue()
        with self._lock:
            self._front.ask_stats(answer.put)
        return {**self._metrics.summary(), **answer.get(timeout=5)}

    @property
    def fingerprint(self) -> dict[str, str]:
        """Under what this engine's bits hold."""
        return dict(self._front.check_open().fingerprint.parts)

    def close(self) -> None:
        """End what runs and free the model. Idempotent."""
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _handle(self, notices: Sequence[Notice]) -> None:
        with self._lock:
            self._front.handle(notices)

    def _on_end(self, code: int) -> None:
        with self._lock:
            self._front.engine_ended("the engine failed; its log says why")

    def _on_state(self) -> None:
        if self._front.state in (EngineState.SERVING, EngineState.FAILED):
            self._settled.set()


class EventStream(Iterator[pb.GenerateEvent]):
    """One request. Iterate over its events; `close`, or forgetting it, cancels what is still running."""

    def __init__(self, front: FrontEnd, lock: threading.RLock, message: pb.GenerateRequest) -> None:
        self._front, self._lock = front, lock
        self._news: SimpleQueue[pb.GenerateEvent | None] = SimpleQueue()
        self._stream: Stream | None = None
        request_id = message.request_id if message.HasField("request_id") else uuid.uuid4().hex
        arrival = time.monotonic()
        try:
            with self._lock:
                facts = front.check_open().facts
            prompt = prompt_ids(message, facts)
            with self._lock:
                self._stream = front.open(message, prompt, request_id, _Sink(self._news), arrival=arrival)
        except InvalidRequest as error:
            raise RequestFailed(of_error(error)) from None
        except Failure as failure:
            raise RequestFailed(failure.status) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __next__(self) -> pb.GenerateEvent:
        event = self._news.get()
        if event is not None:
            return event
        self._news.put(None)
        assert self._stream is not None
        if self._stream.failure is not None:
            raise RequestFailed(self._stream.failure)
        raise StopIteration

    def close(self) -> None:
        if self._stream is not None:
            with self._lock:
                self._front.cancel(self._stream)
            self._news.put(None)


class _Sink:
    """Takes news where they arise, under the lock, and hands them to the reader's thread."""

    def __init__(self, news: SimpleQueue[pb.GenerateEvent | None]) -> None:
        self._news = news

    def notify(self, stream: Stream) -> None:
        for event in stream.take():
            self._news.put(event)
        if stream.done:
            self._news.put(None)


def request_of(prompt: Prompt, **fields: Any) -> pb.GenerateRequest:
    """A GenerateRequest from Python values; TypeError for an unknown field."""
    message = pb.GenerateRequest()
    if isinstance(prompt, str):
        message.text = prompt
    elif prompt and isinstance(prompt[0], Mapping):
        for entry in prompt:
            message.chat.messages.add(role=entry["role"], content=entry["content"])  # type: ignore[index]
    else:
        message.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
    for name in REQUEST_FIELDS:
        if fields.get(name) is not None:
            setattr(message, name, fields.pop(name))
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    try:
        message.sampling.CopyFrom(pb.SamplingParams(**{name: v for name, v in fields.items() if v is not None}))
    except ValueError as error:
        raise TypeError(str(error)) from None
    return message


def _is_batch(prompt: Any) -> bool:
    return (
        not isinstance(prompt, str | pb.GenerateRequest)
        and len(prompt) > 0
        and not isinstance(prompt[0], int | Mapping)
        and not hasattr(prompt, "dtype")
    )


def _collect(events: Iterator[pb.GenerateEvent]) -> Result:
    result = Result("", 0, "", [], [], pb.Usage())
    found: dict[int, Completion] = {}
    for event in events:
        if event.HasField("started"):
            started = event.started
            result.request_id, result.seed = started.request_id, started.seed
            result.fingerprint = started.fingerprint.digest
        result.prompt_logprobs += [
            entry.logprob if entry.HasField("logprob") else None for entry in event.prompt_logprobs
        ]
        choice = found.setdefault(event.index, Completion(event.index))
        choice.text += event.text
        choice.token_ids += event.token_ids
        choice.logprobs += event.logprobs
        choice.alternatives += [[(a.token_id, a.logprob) for a in row.alternatives] for row in event.alternatives]
        choice.logits += event.logits
        if event.HasField("finish"):
            finish = event.finish
            choice.finish_reason = pb.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()
            choice.cumulative_logprob = finish.cumulative_logprob
            kind = finish.stop_reason.WhichOneof("kind")
            choice.stop_reason = getattr(finish.stop_reason, kind) if kind is not None else None
        if event.HasField("usage"):
            result.usage = event.usage
    result.choices = [found[index] for index in sorted(found)]
    return result


def _load(
    folder: Path, device: str, dtype: str | None, numerics: str, threads: int | None, sample_at_scheduler: bool
) -> Executor:
    """The engine of this process. A composition root: the worker is built here, and torch imported."""
    from worker_svc import launch

    threads = threads or launch.available_cores()
    if "torch" not in sys.modules:
        launch.fix_reductions(numerics, threads)
    from worker_svc.assembly import Refused, check, load_executor
    from worker_svc.config import WorkerConfig

    assert numerics in ("invariant", "fast"), numerics
    config = WorkerConfig(folder, device=device, dtype=dtype, numerics=numerics, threads=threads)  # type: ignore[arg-type]
    try:
        check(config)
        executor: Executor = load_executor(config)
    except Refused as refusal:
        raise RuntimeError(str(refusal)) from refusal
    if sample_at_scheduler:
        from scheduler_svc.host_sampling import HostSampling

        executor = HostSampling(executor)
    return executor
