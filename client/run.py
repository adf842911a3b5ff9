"""One request over as many connections as it takes; no I/O, so the sync and the async client share it.

Knows what has arrived of every choice, how to ask for the rest (`resume`), and when to give up.
Does not know calls, channels or clocks: `now` and `dice` are arguments.
Invariant: tokens, text and scores are appended in order and never twice; a choice finishes once. The server's text
after k tokens is a function of those tokens, so what we hold of text is exactly what the k tokens gave.
"""

from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add

from client.errors import DeadlineExceeded, Failure, FingerprintMismatch, LockstepError
from client.results import (
    Alternative,
    Choice,
    Completion,
    Delta,
    Fingerprint,
    Finish,
    FinishReason,
    PromptToken,
    Usage,
)
from client.retry import Patience, RetryPolicy
from protos import generation_pb2 as pb

_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
    pb.FINISH_REASON_ERROR: "error",
}


@dataclass(slots=True)
class _Received:
    """What has arrived of one choice."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[tuple[Alternative, ...]] = field(default_factory=list)
    finish: Finish | None = None

    def choice(self) -> Choice:
        return Choice(
            self.index,
            tuple(self.token_ids),
            "".join(self.text),
            tuple(self.logprobs),
            tuple(self.alternatives),
            self.finish,
        )


class Run:
    """The life of one request on the client's side."""

    def __init__(self, request: pb.GenerateRequest, policy: RetryPolicy, now: float, addresses: int = 1) -> None:
        self.request = request
        self.request_id = request.request_id
        self.resumed = 0
        self.last_failure: Failure | None = None
        self._patience = Patience(policy, now)
        self._addresses = addresses
        self._deadline = now + request.timeout_ms / 1000 if request.HasField("timeout_ms") else None
        self._received = [_Received(index) for index in range(max(1, request.sampling.n or 1))]
        self._aborted: dict[int, Finish] = {}
        self._started: pb.Started | None = None
        self._prompt_logprobs: tuple[PromptToken, ...] = ()
        self._usage = Usage()
        self._attempts = 0

    def remaining_s(self, now: float) -> float | None:
        """Seconds until the request's own deadline; None: it has none. Raises DeadlineExceeded."""
        if self._deadline is None:
            return None
        if now >= self._deadline:
            last = f"; the last failure was {self.last_failure.error()}" if self.last_failure else ""
            raise self._with_partial(DeadlineExceeded(f"no complete answer in time{last}", "DEADLINE_EXCEEDED"))
        return self._deadline - now

    def not_before(self, since: float) -> None:
        """A request that waited in a batch starts losing patience at `since`."""
        if self._attempts == 0:
            self._patience.progressed(since)

    def message(self, now: float) -> pb.GenerateRequest:
        """What to send for the next attempt: the request itself, or with all that is already here."""
        remaining = self.remaining_s(now)
        self._attempts += 1
        self._aborted.clear()
        message = pb.GenerateRequest()
        message.CopyFrom(self.request)
        if remaining is not None:
            message.timeout_ms = max(1, round(remaining * 1000))
        if self._started is not None:
            self.resumed += 1
            message.expected_fingerprint = self._started.fingerprint.digest
            message.resume.seed = self._started.seed
            del message.resume.choices[:]
            for received in self._received:
                message.resume.choices.add(token_ids=received.token_ids)
        return message

    def feed(self, event: pb.GenerateEvent, now: float) -> Delta | None:
        """Takes one event in; what it added, None for one that adds nothing to a choice."""
        if event.HasField("started"):
            self._start(event.started)
        if event.prompt_logprobs and not self._prompt_logprobs:
            self._prompt_logprobs = tuple(
                PromptToken(
                    entry.logprob if entry.HasField("logprob") else None,
                    tuple(Alternative(one.token_id, one.logprob) for one in entry.alternatives),
                )
                for entry in event.prompt_logprobs
            )
        if event.HasField("usage"):
            used = event.usage
            self._usage = Usage(used.prompt_tokens, used.completion_tokens, used.cached_tokens, used.queue_ms)
        self._patience.progressed(now)
        received = self._received[event.index]
        if received.finish is not None:  # a resumed request states the end of a finished choice again
            return None
        finish = _finish_of(event)
        if finish is not None and finish.reason in ("abort", "error"):
            self._aborted[event.index] = finish  # not an end if the connection turns out to be going down
            finish = None
        if finish is not None and self.resumed:
            # The server sums what it returned on this connection. In order, as it does: sum() compensates from 3.12 on.
            total = reduce(add, (*received.logprobs, *event.logprobs), 0.0)
            finish = replace(finish, cumulative_logprob=total)
        delta = Delta(
            event.index,
            tuple(event.token_ids),
            event.text,
            tuple(event.logprobs),
            tuple(tuple(Alternative(a.token_id, a.logprob) for a in one.alternatives) for one in event.alternatives),
            event.logits,
            event.logits_dtype,
            finish,
        )
        received.token_ids.extend(delta.token_ids)
        if delta.text:
            received.text.append(delta.text)
        received.logprobs.extend(delta.logprobs)
        received.alternatives.extend(delta.alternatives)
        received.finish = finish
        return delta if delta.token_ids or delta.text or delta.finish else None

    @property
    def complete(self) -> bool:
        """Every choice has its terminal event."""
        return all(received.finish or received.index in self._aborted for received in self._received)

    def completion(self) -> Completion:
        """What has arrived so far."""
        for index, finish in self._aborted.items():
            self._received[index].finish = self._received[index].finish or finish
        started = self._started
        fingerprint = Fingerprint(started.fingerprint.digest, dict(started.fingerprint.parts)) if started else None
        return Completion(
            self.request_id,
            started.seed if started else None,
            fingerprint or Fingerprint(),
            tuple(received.choice() for received in self._received),
            self._usage,
            self._prompt_logprobs,
            self.resumed,
        )

    def failed(self, failure: Failure, now: float, dice: float) -> float:
        """Seconds to wait before the next attempt. Raises the typed error when there shall be none."""
        self.last_failure = failure
        wait = self._patience.wait_s(failure, self._attempts, now, dice)
        if failure.code == "FAILED_PRECONDITION" and self._started and self._patience.failures < self._addresses:
            return 0.0  # a replica of another kind; the next one may be of ours
        if wait is None:
            raise self._with_partial(failure.error())
        if self._deadline is not None and now + wait >= self._deadline:
            message = f"no complete answer in time; the last failure was {failure.error()}"
            raise self._with_partial(DeadlineExceeded(message, "DEADLINE_EXCEEDED"))
        return wait

    def _start(self, started: pb.Started) -> None:
        if self._started is None:
            self._started = started
        elif self._started.fingerprint.digest != started.fingerprint.digest:
            mine, theirs = self._started.fingerprint.parts, started.fingerprint.parts
            differing = sorted(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key))
            message = f"the stream was resumed under another fingerprint; it differs in {', '.join(differing)}"
            raise self._with_partial(FingerprintMismatch(message, "FAILED_PRECONDITION"))

    def _with_partial(self, error: LockstepError) -> LockstepError:
        error.partial = self.completion()
        return error


def _finish_of(event: pb.GenerateEvent) -> Finish | None:
    if not event.HasField("finish"):
        return None
    reason: int | str | None = None
    if event.finish.HasField("stop_reason"):
        stop = event.finish.stop_reason
        kind = stop.WhichOneof("kind")
        reason = None if kind is None else getattr(stop, kind)
    return Finish(_REASONS.get(event.finish.reason, "error"), reason, event.finish.cumulative_logprob)
