"""One request as its reader sees it: tokens come in, events go out, in pieces as large as the reader is slow.

Knows text and the messages of the public API; not sockets, not the engine. Invariants: events are aligned to tokens
(the text of an event is that of its tokens), nothing is dropped, no event is larger than a message may be, exactly one
finish for each choice, and nothing before the first token.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from google.rpc.status_pb2 import Status
from numpy.typing import NDArray

from protos import generation_pb2 as pb
from protos.step import NO_FLOATS, NO_INTS, Float32s, Floats, Int32s
from scheduler_svc import limits, statuses
from scheduler_svc.core.events import Finished, FinishReason, PromptScores
from scheduler_svc.text import ChoiceText
from scheduler_svc.validation import Prepared

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_ABORT,
    FinishReason.TIMEOUT: pb.FINISH_REASON_ABORT,
    FinishReason.DRAINED: pb.FINISH_REASON_ABORT,
    FinishReason.NAN: pb.FINISH_REASON_ERROR,
    FinishReason.UNAVAILABLE: pb.FINISH_REASON_ERROR,
}
_TOKEN_COST = 80  # bytes that an unread token takes here, roughly
_ALTERNATIVE_COST = 8
_PIECE_COST = 10  # bytes of one alternative or prompt score on the wire, at most


@dataclass(slots=True)
class Choice:
    """One choice: what its reader has not taken yet, and how it ended."""

    index: int
    text: ChoiceText
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)  # one for each of token_ids
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[tuple[Int32s, Float32s]] = field(default_factory=list)
    logits: list[Floats] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    last_token_at: float = 0.0
    finished: Finished | None = None
    reason: FinishReason | None = None  # of the end, once it is known
    told_finish: bool = False
    tail: str = ""  # text that came only with the end

    def push(self, token_id: int) -> int:
        """Take one token; the memory it costs until it is read."""
        piece = self.text.push(token_id)
        self.token_ids.append(token_id)
        self.pieces.append(piece)
        return _TOKEN_COST + len(piece)

    def finish(self, finished: Finished) -> None:
        # A stop string was completed before whatever else ended the choice, if only the core heard of it later.
        stopped = self.text.stop is not None
        self.finished = finished
        self.tail = self.text.finish()
        stopped |= self.text.stop is not None and finished.reason is FinishReason.LENGTH
        self.reason = FinishReason.STOP if stopped else finished.reason

    def has_news(self) -> bool:
        return bool(self.token_ids) or (self.finished is not None and not self.told_finish)

    def take(self, vocab_bytes: int) -> Iterator[pb.GenerateEvent]:
        """All news as events, each below the bound of a message."""
        width = _PIECE_COST + (_PIECE_COST * len(self.alternatives[0][0]) if self.alternatives else 0)
        width += vocab_bytes if self.logits else 0
        step = max(1, limits.MAX_EVENT_BYTES // (width + 8))
        total = len(self.token_ids)
        for start in range(0, max(total, 1), step):
            chosen = slice(start, start + step)
            event = pb.GenerateEvent(
                index=self.index,
                token_ids=self.token_ids[chosen],
                text="".join(self.pieces[chosen]),
                logprobs=self.logprobs[chosen],
            )
            for ids, values in self.alternatives[chosen]:
                _add_alternatives(event.alternatives.add(), ids, values)
            if self.logits:
                event.logits = np.ascontiguousarray(self.logits[start : start + step]).tobytes()
                event.logits_dtype = self.logits[0].dtype.name
            if start + step >= total and self.finished is not None:
                self._tell_finish(event)
            yield event
        for column in (self.token_ids, self.pieces, self.logprobs, self.alternatives, self.logits):
            column.clear()

    def _tell_finish(self, event: pb.GenerateEvent) -> None:
        assert self.finished is not None and self.reason is not None and not self.told_finish
        self.told_finish = True
        event.text += self.tail
        event.finish.reason = _REASONS[self.reason]
        event.finish.cumulative_logprob = self.cumulative_logprob
        if self.reason is FinishReason.STOP:
            if self.text.stop is not None:
                event.finish.stop_reason.text = self.text.stop
            elif self.finished.stop_token_id is not None:
                event.finish.stop_reason.token_id = self.finished.stop_token_id


class Stream:
    """One request, from submission to its last event."""

    def __init__(self, prepared: Prepared, choices: list[Choice], fingerprint: pb.Fingerprint, vocab_size: int) -> None:
        self.prepared = prepared
        self.request = prepared.request
        self.choices = choices
        self.unread_bytes = 0
        self.failure: Status | None = None  # the request has ended so; events may still be there to read
        self.first_token_at: float | None = None
        self.trace_parent = ""  # the caller's W3C traceparent
        self.traced = False
        self.first_admission_s = 0.0
        self.cached_tokens = 0
        self._fingerprint = fingerprint
        self._vocab_size = vocab_size
        self._started = False
        self._scores: list[PromptScores] = []
        self._owes_scores = self.request.prompt_logprobs is not None
        self._left = len(choices)

    @property
    def done(self) -> bool:
        """Nothing more will come in."""
        return self._left == 0 or self.failure is not None

    def has_news(self) -> bool:
        return any(choice.has_news() for choice in self.choices)

    @property
    def must_end(self) -> bool:
        """A choice ended badly while others run: the request has failed as a whole."""
        return (
            self._left > 0
            and statuses.of_finish([choice.reason for choice in self.choices if choice.reason]) is not None
        )

    def add_scores(self, scores: PromptScores) -> None:
        self._scores.append(scores)

    def finish(self, finished: Finished) -> None:
        choice = self.choices[finished.choice]
        assert choice.finished is None, f"{self.request.request_id}: choice {finished.choice} ended twice"
        choice.finish(finished)
        self.cached_tokens = max(self.cached_tokens, finished.cached_tokens)
        if finished.choice == 0:
            self.first_admission_s = finished.queue_s
        self._left -= 1
        if self._left == 0 and self.failure is None:
            self.failure = statuses.of_finish([choice.reason for choice in self.choices if choice.reason])

    def take(self) -> list[pb.GenerateEvent]:
        """Everything that is new, oldest first; empty when nothing is."""
        events: list[pb.GenerateEvent] = []
        for choice in self.choices:
            if choice.has_news():
                news = list(choice.take(self._vocab_size * 8))
                if choice.index == 0 and self._owes_scores:
                    # They end in the first event with a token; only scores that are too large for it go ahead.
                    *ahead, last = self._take_scores()
                    news[0].prompt_logprobs.extend(last)
                    events += [pb.GenerateEvent(prompt_logprobs=entries) for entries in ahead]
                events += news
        self.unread_bytes = 0
        if events and not self._started:
            self._started = True
            events[0].request_id = self.request.request_id
            events[0].started.CopyFrom(self._describe())
        if events and self._left == 0:
            events[-1].usage.CopyFrom(self.usage())
        return events

    def usage(self) -> pb.Usage:
        return pb.Usage(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=sum(choice.text.num_tokens for choice in self.choices),
            cached_tokens=self.cached_tokens,
            queue_ms=self.first_admission_s * 1000,
        )

    def _describe(self) -> pb.Started:
        return pb.Started(
            request_id=self.request.request_id,
            seed=self.request.seed,
            fingerprint=self._fingerprint,
            prompt_tokens=len(self.request.prompt),
        )

    def _take_scores(self) -> list[list[pb.PromptLogprob]]:
        """The prompt's scores, cut into lists that a message can carry."""
        self._owes_scores = False
        k = self.request.prompt_logprobs or 0
        logprobs = np.concatenate([NO_FLOATS, *(scores.logprobs for scores in self._scores)])
        ids = np.concatenate([NO_INTS, *(scores.alternative_ids for scores in self._scores)])
        values = np.concatenate([NO_FLOATS, *(scores.alternative_logprobs for scores in self._scores)])
        ids, values = ids.reshape(len(logprobs), k), values.reshape(len(logprobs), k)
        self._scores.clear()
        entries = [pb.PromptLogprob()]  # nothing comes before the first token, so it has no score
        for logprob, entry_ids, entry_values in zip(logprobs.tolist(), ids, values):
            entry = pb.PromptLogprob(logprob=logprob)
            _add_alternatives(entry, entry_ids, entry_values)
            entries.append(entry)
        step = max(1, limits.MAX_EVENT_BYTES // (_PIECE_COST * (k + 1)))
        return [entries[at : at + step] for at in range(0, len(entries), step)]


def _add_alternatives(
    message: pb.TokenAlternatives | pb.PromptLogprob, ids: NDArray[np.int32], values: NDArray[np.float32]
) -> None:
    for token_id, value in zip(ids.tolist(), values.tolist()):
        message.alternatives.add(token_id=token_id, logprob=value)
