"""Many requests over one GenerateMany stream: which are waiting, in flight, due again or done. No I/O.

Invariant: each request ends exactly once, as a Completion or as a LockstepError; at most `window` are in flight, so a
batch of any size respects the server's bounded queue.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from client.errors import Failure, LockstepError, failure_of_status
from client.results import Completion, Delta
from client.run import Run
from protos import generation_pb2 as pb

Outcome = Completion | LockstepError


class Batch:
    """The client's side of one or more successive GenerateMany streams."""

    def __init__(self, runs: Iterable[Run], window: int, dice: Callable[[], float]) -> None:
        self._runs = list(runs)
        self._index = {run.request_id: index for index, run in enumerate(self._runs)}
        assert len(self._index) == len(self._runs), "request ids of a batch must differ"
        self._waiting = deque(self._runs)
        self._due: list[tuple[float, int, Run]] = []
        self._in_flight: dict[str, Run] = {}
        self._window = window
        self._dice = dice
        self._open = len(self._runs)
        self._ended: list[tuple[int, Outcome]] = []  # not told yet
        self._progress: float | None = None

    @property
    def done(self) -> bool:
        """Every request has ended; `ended` may still have to be asked for the last ones."""
        return self._open == 0

    def ready(self, now: float) -> list[pb.ClientMessage]:
        """What to send now."""
        messages: list[pb.ClientMessage] = []
        while len(self._in_flight) < self._window and (run := self._next(now)):
            run.not_before(now if self._progress is None else self._progress)
            try:
                messages.append(pb.ClientMessage(request=run.message(now)))
            except LockstepError as error:
                self._end(run, error)
                continue
            self._in_flight[run.request_id] = run
        return messages

    def wait_s(self, now: float) -> float | None:
        """Seconds until `ready` may have something without any event; None: not before one."""
        return max(0.0, self._due[0][0] - now) if self._due and len(self._in_flight) < self._window else None

    def feed(self, event: pb.GenerateEvent, now: float) -> Iterator[tuple[int, Delta | Outcome]]:
        """Takes one event in; what it added and what it ended, by the request's index in the batch."""
        self._progress = now
        run = self._in_flight.get(event.request_id)
        if run is None:  # of a request that we have cancelled or given up
            return
        if event.HasField("status") and event.status.code:
            self._in_flight.pop(event.request_id)
            self._again(run, failure_of_status(event.status), now)
        else:
            try:
                delta = run.feed(event, now)
            except LockstepError as error:
                self._in_flight.pop(event.request_id)
                self._end(run, error)
                delta = None
            if delta is not None:
                yield self._index[run.request_id], delta
            if event.HasField("usage") and event.request_id in self._in_flight:  # the last event of a request
                self._in_flight.pop(event.request_id)
                self._end(run, run.completion())
        yield from self.ended()

    def disconnected(self, failure: Failure, now: float) -> None:
        """The stream is gone: everything in flight is to be asked for again."""
        flying, self._in_flight = list(self._in_flight.values()), {}
        for run in flying:
            self._again(run, failure, now)

    def ended(self) -> Iterator[tuple[int, Outcome]]:
        """Requests that ended since the last call."""
        ended, self._ended = self._ended, []
        yield from ended

    def _next(self, now: float) -> Run | None:
        if self._due and self._due[0][0] <= now:
            return heapq.heappop(self._due)[2]
        return self._waiting.popleft() if self._waiting else None

    def _again(self, run: Run, failure: Failure, now: float) -> None:
        try:
            wait = run.failed(failure, now, self._dice())
        except LockstepError as error:
            self._end(run, error)
        else:
            heapq.heappush(self._due, (now + wait, self._index[run.request_id], run))

    def _end(self, run: Run, outcome: Outcome) -> None:
        self._open -= 1
        self._ended.append((self._index[run.request_id], outcome))
