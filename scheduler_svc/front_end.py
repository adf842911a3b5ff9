"""The front end without its wire: admits requests, follows their choices, ends them. Used by the gRPC service and by
the embedded engine alike.

Knows requests, text and the engine's messages; no sockets, no threads: every method is called from one thread at a
time. Invariants: a request is in `live` from its submission to its end, its id is free again as soon as it has ended,
and the engine is told of every end that it does not know itself.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from google.rpc import code_pb2
from google.rpc.status_pb2 import Status

from protos import generation_pb2 as pb
from protos.step import Int32s
from scheduler_svc import limits, statuses
from scheduler_svc.core.events import Finished, FinishReason, Tokens
from scheduler_svc.known_model import KnownModel, learn
from scheduler_svc.messages import (
    AskStats,
    Cancel,
    Command,
    Drain,
    EngineState,
    Notice,
    Refused,
    StateChanged,
    StatsReport,
    Stepped,
    StopChoice,
    Submit,
)
from scheduler_svc.observer import Observer
from scheduler_svc.sampling_fields import Violation
from scheduler_svc.streams import Choice, Stream
from scheduler_svc.text import StopTable
from scheduler_svc.validation import InvalidRequest, Prepared, WrongFingerprint, prepare

logger = logging.getLogger(__name__)


class Failure(Exception):
    """A request that was not admitted."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.message)
        self.status = status


class Sink(Protocol):
    """Whoever reads a stream: told that it has news, at most once a step."""

    def notify(self, stream: Stream) -> None: ...


class FrontEnd:
    """Args:
    send: puts a command on its way to the engine.
    tokenizer_folder: the snapshot's tokenizer; None: the folder that the workers name, if it exists here.
    """

    def __init__(
        self,
        send: Callable[[Command], None],
        observer: Observer,
        tokenizer_folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._observer = observer
        self._tokenizer_folder = tokenizer_folder
        self._clock = clock
        self._live: dict[int, tuple[Stream, Sink]] = {}
        self._ids: dict[str, int] = {}
        self._next_key = 1
        self._next_ticket = 1
        self._stats_waiters: dict[int, Callable[[Mapping[str, float]], None]] = {}
        self.state = EngineState.STARTING
        self.reason = "the workers are not ready yet"
        self.model: KnownModel | None = None
        self.draining = False
        self.on_state: Callable[[], None] = lambda: None
        self.on_idle: Callable[[], None] = lambda: None
        self.on_silence: Callable[[], None] = lambda: None
        self._asked_at: float | None = None

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def shown_state(self) -> EngineState:
        return EngineState.DRAINING if self.draining and self.state is not EngineState.FAILED else self.state

    # Requests

    def check_open(self) -> KnownModel:
        """The model that serves. Raises Failure when no request is taken at all."""
        if self.draining:
            raise Failure(statuses.unavailable("the scheduler is shutting down"))
        if self.model is None or self.state is EngineState.FAILED:
            raise Failure(statuses.unavailable(f"the scheduler is {self.state.value}: {self.reason}"))
        return self.model

    def open(
        self,
        message: pb.GenerateRequest,
        prompt: Int32s,
        request_id: str,
        sink: Sink,
        *,
        arrival: float,
        deadline: float | None = None,
        trace_parent: str = "",
    ) -> Stream:
        """Admit a request; what the core refuses later arrives as the stream's failure. Raises Failure.

        `deadline` is that of the call; the request's own timeout counts from `arrival`.
        """
        model = self.check_open()
        if request_id in self._ids:
            raise Failure(statuses.duplicate(f"request_id {request_id!r} is live"))
        key = self._next_key
        try:
            prepared = prepare(
                message, prompt, model.facts, key=key, request_id=request_id, now=arrival, deadline=deadline
            )
            stream, stops = self._build(prepared, model)
        except (InvalidRequest, WrongFingerprint) as error:
            raise Failure(statuses.of_error(error)) from error
        self._next_key += 1
        stream.trace_parent = trace_parent
        self._live[key] = (stream, sink)
        self._ids[request_id] = key
        self._send(Submit(prepared.request))
        for stop in stops:
            self._send(stop)
        self._observer.admitted(stream)
        return stream

    def cancel(self, stream: Stream) -> None:
        """The reader is gone. Idempotent."""
        if stream.request.key in self._live:
            self._send(Cancel(stream.request.key))
            self._forget(stream, statuses.status(code_pb2.CANCELLED, "cancelled by the client"))

    def abort(self, request_ids: Sequence[str]) -> list[str]:
        """End requests for somebody else than their readers, who are told; those that were live."""
        found = list(dict.fromkeys(request_id for request_id in request_ids if request_id in self._ids))
        for request_id in found:
            self._send(Cancel(self._ids[request_id]))
        return found

    def fail(self, stream: Stream, status: Status) -> None:
        """End a request from our side and tell its reader."""
        entry = self._live.get(stream.request.key)
        if entry is not None:
            self._send(Cancel(stream.request.key))
            self._forget(stream, status)
            entry[1].notify(stream)

    def fail_all(self, status: Status) -> None:
        for stream, _ in list(self._live.values()):
            self.fail(stream, status)

    def drain(self, now: bool = False) -> None:
        """Take no new request; with `now` also end what runs."""
        self.draining = True
        self._send(Drain(now))
        self.on_state()

    def refused(self, status: Status) -> None:
        """A request went no further than its validation."""
        self._observer.refused(status)

    def ask_stats(self, answer: Callable[[Mapping[str, float]], None]) -> None:
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self._stats_waiters[ticket] = answer
        self._send(AskStats(ticket))

    def watch(self, now: float) -> None:
        """While requests are live: ask the engine for a sign of life, and tell when none comes."""
        if self._asked_at is None:
            if self._live:
                self._asked_at = now
                self._send(AskStats(0))
        elif now - self._asked_at > limits.ENGINE_SILENCE_S:
            self._asked_at = None
            self.on_silence()

    # The engine's news

    def handle(self, notices: Sequence[Notice]) -> None:
        self._asked_at = None
        for notice in notices:
            if isinstance(notice, Stepped):
                self._step(notice)
            elif isinstance(notice, Refused):
                self._refuse(notice)
            elif isinstance(notice, StateChanged):
                self._change_state(notice)
            elif isinstance(notice, StatsReport):
                self._observer.stats(notice.values)
                answer = self._stats_waiters.pop(notice.ticket, None)
                if answer is not None:
                    answer(notice.values)

    def engine_ended(self, reason: str) -> None:
        """The loop is gone: nothing will come any more."""
        self.state, self.reason = EngineState.FAILED, reason
        for stream, sink in list(self._live.values()):
            self._forget(stream, statuses.unavailable(reason))
            sink.notify(stream)
        self.on_state()

    def _step(self, stepped: Stepped) -> None:
        events = stepped.events
        dirty: dict[int, tuple[Stream, Sink]] = {}
        if len(events.tokens.keys):
            self._take_tokens(events.tokens, dirty)
            for stream, _ in dirty.values():
                if stream.traced:
                    self._observer.stepped(stream, stepped)
        for scores in events.scores:
            entry = self._live.get(scores.key)
            if entry is not None:
                entry[0].add_scores(scores)
        for row in events.logits:
            entry = self._live.get(row.key)
            if entry is not None:
                choice = entry[0].choices[row.choice]
                if len(choice.logits) < len(choice.token_ids):
                    choice.logits.append(row.logits)
                    entry[0].unread_bytes += row.logits.nbytes
        for finished in events.finished:
            self._finish(finished, dirty)
        for stream, sink in dirty.values():
            if stream.unread_bytes > limits.MAX_UNREAD_BYTES and not stream.done:
                message = f"the reader left {stream.unread_bytes} bytes unread; at most {limits.MAX_UNREAD_BYTES} wait"
                self.fail(stream, statuses.status(code_pb2.RESOURCE_EXHAUSTED, message))
            else:
                sink.notify(stream)

    def _take_tokens(self, tokens: Tokens, dirty: dict[int, tuple[Stream, Sink]]) -> None:
        now = self._clock()
        live = self._live
        count = 0
        first_token_s: list[float] = []
        gaps_s: list[float] = []
        offset = 0
        columns = (tokens.keys, tokens.choices, tokens.token_ids, tokens.logprobs, tokens.alternative_counts)
        for key, index, token_id, logprob, alternatives in zip(*(column.tolist() for column in columns)):
            start, offset = offset, offset + alternatives
            entry = live.get(key)
            if entry is None:
                continue
            stream = entry[0]
            choice = stream.choices[index]
            if choice.text.ended:
                continue  # computed past a stop string that the core had not heard of yet
            stream.unread_bytes += choice.push(token_id)
            if stream.prepared.wants_logprobs:
                choice.logprobs.append(logprob)
                choice.cumulative_logprob += logprob
                ids = tokens.alternative_ids[start:offset].copy()
                choice.alternatives.append((ids, tokens.alternative_logprobs[start:offset].copy()))
                stream.unread_bytes += 200 + 8 * alternatives
            if choice.text.stop is not None:
                self._send(StopChoice(key, index, choice.text.num_tokens))
            if choice.last_token_at:
                gaps_s.append(now - choice.last_token_at)
            choice.last_token_at = now
            if stream.first_token_at is None:
                stream.first_token_at = now
                first_token_s.append(now - stream.request.arrival)
            count += 1
            dirty[key] = entry
        self._observer.tokens(count, first_token_s, gaps_s)

    def _finish(self, finished: Finished, dirty: dict[int, tuple[Stream, Sink]]) -> None:
        entry = self._live.get(finished.key)
        if entry is None:
            return
        stream = entry[0]
        stream.finish(finished)
        if finished.reason is FinishReason.UNAVAILABLE and stream.failure is not None and self.reason:
            stream.failure = statuses.unavailable(f"{stream.failure.message}: {self.reason}")
        dirty[finished.key] = entry
        if stream.done:
            self._forget(stream, None)
        elif stream.must_end:
            self._send(Cancel(finished.key))

    def _refuse(self, refused: Refused) -> None:
        entry = self._live.get(refused.key)
        if entry is not None:
            stream, sink = entry
            status = statuses.of_refusal(refused)
            stream.failure = status
            del self._live[refused.key]
            self._ids.pop(stream.request.request_id, None)
            self._observer.refused_late(stream, status)
            sink.notify(stream)
            if not self._live:
                self.on_idle()

    def _forget(self, stream: Stream, failure: Status | None) -> None:
        if failure is not None:
            stream.failure = failure
        del self._live[stream.request.key]
        self._ids.pop(stream.request.request_id, None)
        self._observer.ended(stream, self._clock())
        if not self._live:
            self.on_idle()

    def _change_state(self, notice: StateChanged) -> None:
        if notice.facts is not None:
            self.model = learn(notice.facts, self._tokenizer_folder, self.model)
        self.state, self.reason = notice.state, notice.reason
        self._observer.state(notice.state, notice.reason)
        if notice.state is EngineState.FAILED:  # for good: nobody shall wait for the end of the process
            self.fail_all(statuses.unavailable(notice.reason))
        self.on_state()

    # Text

    def _build(self, prepared: Prepared, model: KnownModel) -> tuple[Stream, list[StopChoice]]:
        """The stream of a request, with the text of resumed tokens behind it, and the stops that those contain."""
        rules, request = prepared.text, prepared.request
        choices, stops, violations = [], [], []
        prompt = request.prompt.tolist()
        strings = StopTable(rules.stops)
        for index in range(request.n):
            text = model.choice_text(prompt, rules, strings)
            if request.resume:
                resumed = request.resume[index].tolist()
                for token_id in resumed:
                    text.push(token_id)
                    if text.stop is not None:
                        break
                if text.stop is not None and text.num_tokens < len(resumed):
                    name = f"resume.choices[{index}].token_ids"
                    what = f"goes on after token {text.num_tokens - 1}, which completed a stop string"
                    violations.append(Violation(name, what))
                elif text.stop is not None:
                    stops.append(StopChoice(request.key, index, text.num_tokens))
            choices.append(Choice(index, text))
        if violations:
            raise InvalidRequest(violations)
        return Stream(prepared, choices, model.fingerprint, model.facts.vocab_size), stops
