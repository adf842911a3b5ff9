"""The core: requests and results in, batches and events out.

Knows every live request, from acceptance to its terminal event; planning.py decides what a step computes,
committing.py reads results, residency.py keeps slots and blocks. No clock, no randomness, no I/O: time is an argument
and results are handed in.

    submit, cancel, stop, expire, end_all -> take_events()     what ended without a step
    plan -> StepBatch, commit(StepResult) -> StepEvents        one step; also what ended since the last call
    abort_step                                                 the workers lost everything; nothing here is lost

Invariant: every choice of every accepted request gets exactly one Finished; check_invariants() says the rest.
"""

import heapq
from dataclasses import dataclass, field

import numpy as np

from protos.step import Int32s, StepBatch, StepResult
from scheduler_svc.core.committing import Committer
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.events import Finished, FinishReason, StepEvents
from scheduler_svc.core.invariants import check_residency
from scheduler_svc.core.planning import Planner
from scheduler_svc.core.request import Draining, Duplicate, NeverFits, Overloaded, Request
from scheduler_svc.core.residency import Residency
from scheduler_svc.core.sequence import Phase, Sequence
from scheduler_svc.core.stats import Stats
from scheduler_svc.core.stopping import first_stop

_OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED)


@dataclass(eq=False, slots=True)
class _Live:
    request: Request
    sequences: list[Sequence] = field(default_factory=list)  # those that have not ended


class Scheduler:
    """Methods are not to be called from two threads at once. Times are seconds on one clock, never going back."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self._residency = Residency(config)
        self._planner = Planner(self._residency)
        self._committer = Committer(self._residency, self._end_running)
        self._epoch = config.epoch
        self._live: dict[int, _Live] = {}
        self._keys: dict[str, int] = {}  # live request ids
        self._deadlines: list[tuple[float, int]] = []
        self._next_order = 0
        self._finished: list[Finished] = []
        self._now = 0.0
        self._draining = False
        self._finish_interval_s = 0.1  # of choices lately, for the retry hint
        self._last_finish: float | None = None

    # What may run

    @property
    def has_work(self) -> bool:
        """Some choice has not ended."""
        return bool(self._live)

    @property
    def num_in_flight(self) -> int:
        return len(self._residency.in_flight)

    @property
    def can_plan(self) -> bool:
        """Another step may be sent before the next commit."""
        return bool(self._live) and self.num_in_flight < self.config.pipeline_depth

    @property
    def next_deadline(self) -> float | None:
        """When `expire` has something to do, at the earliest."""
        while self._deadlines and self._deadlines[0][1] not in self._live:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    # Requests

    def submit(self, request: Request, now: float) -> None:
        """Accept a request; its choices wait from now on.

        Raises:
            Draining, Duplicate, NeverFits, Overloaded: nothing of the request remains.
        """
        self._now = now
        try:
            self._refuse(request)
        except Exception:
            self._residency.counters.refused += 1
            raise
        self._residency.counters.accepted += 1
        live = self._live[request.key] = _Live(request)
        self._keys[request.request_id] = request.key
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.key))
        stop_set = request.eos_ids | request.stop_token_ids
        stop_ids = np.array(sorted(stop_set), np.int32)
        prompt = np.ascontiguousarray(request.prompt, np.int32)
        for choice in range(request.n):
            output = request.resume[choice] if request.resume else None
            tokens = prompt if output is None else np.concatenate((prompt, output)).astype(np.int32)
            arrival = request.arrival or now
            sequence = Sequence(request, choice, self._next_order, tokens, stop_set, stop_ids, arrival)
            self._next_order += 1
            live.sequences.append(sequence)
        for sequence in list(live.sequences):
            if not self._finished_already(sequence, sequence.tokens[len(prompt) :]):
                self._residency.queue.push(sequence)

    def cancel(self, key: int, now: float, choice: int | None = None) -> None:
        """The caller wants no more of a request, or of one choice. Unknown keys have ended already."""
        self._now = now
        self._end_all_of(key, FinishReason.CANCELLED, choice)

    def stop(self, key: int, choice: int, num_tokens: int, now: float) -> None:
        """The front end found a stop string: the choice has ended after `num_tokens` output tokens."""
        self._now = now
        for sequence in self._sequences(key, choice):
            self._end(sequence, FinishReason.STOP, num_tokens, None)

    def expire(self, now: float) -> None:
        """End what is past its deadline."""
        self._now = now
        while self._deadlines and self._deadlines[0][0] <= now:
            self._end_all_of(heapq.heappop(self._deadlines)[1], FinishReason.TIMEOUT)

    def drain(self) -> None:
        """Take no new requests; those that are live go on."""
        self._draining = True

    def end_all(self, reason: FinishReason, now: float) -> None:
        """Nothing live goes on: a drain or a recovery took too long."""
        self._now = now
        for key in list(self._live):
            self._end_all_of(key, reason)

    def take_events(self) -> StepEvents:
        """What ended since the last call without a step; `commit` returns it too."""
        finished, self._finished = tuple(self._finished), []
        return StepEvents(finished=finished)

    # Steps

    def plan(self, now: float) -> StepBatch | None:
        """The next step, or None: nothing can run, or enough steps are in flight."""
        self.expire(now)
        if not self.can_plan:
            return None
        return self._planner.plan(self._epoch, now)

    def commit(self, result: StepResult, now: float) -> StepEvents:
        """The oldest step in flight is done. A result of an epoch that is over changes nothing."""
        self._now = now
        if result.epoch != self._epoch:
            self._residency.counters.late_results += 1
            return self.take_events()
        step = self._residency.in_flight.popleft()
        assert step.seq == result.seq, f"result {result.seq} where {step.seq} is the oldest step in flight"
        tokens, scores, logits = self._committer.commit(step, result)
        finished, self._finished = tuple(self._finished), []
        return StepEvents(tokens, tuple(scores), tuple(logits), finished)

    def abort_step(self, epoch: int, now: float) -> None:
        """The workers are gone with all that they held: forget the steps in flight; `epoch` is the next batch's."""
        self._now = now
        self._epoch = epoch
        self._residency.counters.aborted_epochs += 1
        self._residency.forget_workers()

    # Facts

    def stats(self) -> Stats:
        residency = self._residency
        waiting, parked = residency.queue.num_sequences, residency.queue.num_parked
        waiting_for: dict[str, int] = {}
        if parked:
            waiting_for["leader"] = parked
        if waiting > parked and self._planner.blocked:
            waiting_for[self._planner.blocked] = 1
        if (behind := waiting - sum(waiting_for.values())) > 0:
            waiting_for["queue"] = behind
        return Stats(
            running=residency.rows.num_live,
            waiting=waiting,
            waiting_tokens=residency.queue.num_tokens,
            waiting_for=waiting_for,
            steps_in_flight=self.num_in_flight,
            blocks=self.config.num_blocks,
            blocks_free=residency.pool.num_free,
            blocks_cached=len(residency.pool.idle),
            blocks_held=residency.num_held,
            draining=self._draining,
            counters=residency.counters,
        )

    def check_invariants(self) -> None:
        """Assert every promise between the parts; slow, for tests and for a flag in production."""
        check_residency(self._residency)
        live = {id(sequence) for entry in self._live.values() for sequence in entry.sequences}
        placed = {id(sequence) for sequence in self._residency.queue}
        placed |= {id(sequence) for sequence in self._residency.rows.sequences if sequence is not None}
        assert live == placed, "every live choice either waits or has a slot"
        assert all(entry.sequences for entry in self._live.values()), "a request without a live choice has ended"
        assert self._keys == {entry.request.request_id: key for key, entry in self._live.items()}

    # Inside

    def _refuse(self, request: Request) -> None:
        config, queue = self.config, self._residency.queue
        if self._draining:
            raise Draining("the server is shutting down and takes no new requests")
        if request.request_id in self._keys:
            raise Duplicate(f"request {request.request_id!r} is still running", "request_id")
        assert request.key not in self._live, f"key {request.key} is live"
        prompt, most = len(request.prompt), max(request.max_tokens, 0)
        if prompt + most > config.max_seq_len:
            raise NeverFits(
                f"{prompt} prompt tokens and max_tokens {most} are {prompt + most} tokens; "
                f"the context holds {config.max_seq_len}",
                "max_tokens",
            )
        blocks = -(-(prompt + most - 1) // config.block_size)  # the last token is never fed back
        if blocks > config.num_blocks:
            raise NeverFits(
                f"{prompt} prompt tokens and max_tokens {most} need {blocks} KV blocks of {config.block_size} tokens; "
                f"there are {config.num_blocks}",
                "max_tokens",
            )
        if request.n > config.max_queue + config.num_slots:
            raise NeverFits(
                f"n is {request.n}; at most {config.max_queue + config.num_slots} choices run and wait at once", "n"
            )
        waiting = queue.num_sequences + request.n - self._residency.rows.num_free
        if waiting > config.max_queue:
            raise Overloaded(
                f"{queue.num_sequences} choices wait and {request.n} more would; the queue holds {config.max_queue}",
                self._retry_after_s(waiting - config.max_queue),
            )
        tokens = request.n * prompt + sum(map(len, request.resume))
        if queue.num_sequences and queue.num_tokens + tokens > config.max_queued_tokens:
            raise Overloaded(
                f"{queue.num_tokens} tokens wait and {tokens} more would; the queue holds {config.max_queued_tokens}",
                self._retry_after_s(1),
            )

    def _retry_after_s(self, finishes: int) -> float:
        """About when so many choices more will have finished, at the pace of late."""
        return round(min(max(finishes * self._finish_interval_s, 0.05), 60.0), 3)

    def _finished_already(self, sequence: Sequence, output: Int32s) -> bool:
        """A choice that has nothing to compute gets only its terminal event."""
        request = sequence.request
        if len(output):
            stop = first_stop(output, sequence.stop_ids, request.sampling.min_tokens)
            if stop is not None:
                self._end(sequence, FinishReason.STOP, stop + 1, int(output[stop]))
                return True
        if len(output) >= request.max_tokens and not (sequence.scores_only and sequence.wants_scores):
            self._end(sequence, FinishReason.LENGTH, min(len(output), request.max_tokens), None)
            return True
        return False

    def _sequences(self, key: int, choice: int | None = None) -> list[Sequence]:
        live = self._live.get(key)
        return [s for s in live.sequences if choice is None or s.choice == choice] if live else []

    def _end_all_of(self, key: int, reason: FinishReason, choice: int | None = None) -> None:
        for sequence in self._sequences(key, choice):
            self._end(sequence, reason, self._num_output(sequence), None)

    def _num_output(self, sequence: Sequence) -> int:
        waiting = sequence.phase is Phase.WAITING
        known = len(sequence.tokens) if waiting else int(self._residency.rows.known[sequence.slot])
        return known - sequence.num_prompt

    def _end_running(self, sequence: Sequence, reason: FinishReason, stop_token_id: int | None) -> None:
        self._end(sequence, reason, self._num_output(sequence), stop_token_id)

    def _end(self, sequence: Sequence, reason: FinishReason, num_output: int, stop_token_id: int | None) -> None:
        """The one place where a choice ends."""
        residency, request = self._residency, sequence.request
        if sequence.admitted_at is not None:
            used = len(request.prompt) + num_output - sequence.cached_tokens
            residency.queue.charge(request.tenant, used - sequence.reserved)
        if sequence.slot >= 0:
            residency.end(sequence, trusted=reason is not FinishReason.NAN)
        elif residency.queue.holds(sequence):
            residency.queue.remove(sequence)
        sequence.phase = Phase.ENDED
        if sequence.stop_set and num_output and reason in _OWN_ENDS:
            residency.lengths.add(num_output)
        live = self._live[request.key]
        live.sequences.remove(sequence)
        if not live.sequences:
            del self._live[request.key]
            del self._keys[request.request_id]
        queue_s = (self._now if sequence.admitted_at is None else sequence.admitted_at) - sequence.arrival
        self._finished.append(
            Finished(
                request.key,
                sequence.choice,
                reason,
                num_output,
                sequence.cached_tokens,
                max(0.0, queue_s),
                stop_token_id,
            )
        )
        counts = residency.counters.finished
        counts[reason.value] = counts.get(reason.value, 0) + 1
        if self._last_finish is not None:
            interval = max(0.0, self._now - self._last_finish)
            self._finish_interval_s += 0.05 * (interval - self._finish_interval_s)
        self._last_finish = self._now
