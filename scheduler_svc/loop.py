"""The engine loop: one thread that owns the core, feeds the executor and tells the front end what happened.

Everything that it waits for arrives in one inbox: commands, results of steps, the news that a group stands or fell. It
sleeps on the inbox when nothing is due, so an idle engine costs no time at all.

    STARTING --group stands--> SERVING --epoch lost--> RECOVERING --group stands--> SERVING
                                                            | --recovery-timeout: live requests end, it keeps trying

A lost epoch costs the core its steps in flight and nothing else: every live row is introduced again to the next group.
The bits that live requests have been promised stand: a group with another fingerprint is let in only when none is left.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue

from protos.step import StepResult
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.decision_log import RecordedScheduler
from scheduler_svc.core.events import FinishReason, StepEvents
from scheduler_svc.core.request import Draining, Duplicate, NeverFits, Overloaded, Refusal, Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.decision_files import DecisionFiles
from scheduler_svc.engine_config import EngineConfig
from scheduler_svc.engine_stats import StepCounters, core_values
from scheduler_svc.executor import Executor
from scheduler_svc.forming import Formed, GroupFormer, NotFormed
from scheduler_svc.messages import (
    AskStats,
    Cancel,
    Command,
    Drain,
    EngineFacts,
    EngineState,
    Notice,
    RefusalKind,
    Refused,
    StateChanged,
    StatsReport,
    Stepped,
    StopChoice,
    Submit,
)

logger = logging.getLogger(__name__)

FRUITLESS_EPOCHS = 5  # in a row without one step done: then the requests are what breaks them, and end
CLOCK_S = 0.002  # how late a deadline may be noticed while no step ends
STATS_S = 0.5  # between reports while there is work


@dataclass(frozen=True, eq=False, slots=True)
class _StepDone:
    epoch: int
    future: Future[StepResult]


@dataclass(frozen=True, slots=True)
class _EpochEnded:
    epoch: int
    reason: str


Item = Command | Formed | NotFormed | _StepDone | _EpochEnded
Inbox = SimpleQueue[Item]


class EngineLoop:
    """Args:
    inbox: where commands are put; the loop's own items come through it too.
    emit: takes the notices of one pass, in order; it may block, which holds the loop and nobody else up.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        inbox: Inbox,
        emit: Callable[[Sequence[Notice]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = replace(config, pipeline_depth=1) if config.sample_at_scheduler else config
        self._executor = executor
        self._inbox = inbox
        self._emit = emit
        self._clock = clock
        self._notices: list[Notice] = []
        self._state = EngineState.STARTING
        self._core: Scheduler | None = None
        self._facts: EngineFacts | None = None
        self._epoch = 0
        self._former = GroupFormer(self._config, executor, inbox.put, lambda: bool(self._live))
        self._fallen: _EpochEnded | None = None  # the last epoch that ended by itself
        self._in_flight: dict[int, float] = {}  # seq -> when it was sent
        self._live: dict[int, int] = {}  # key -> choices that have not ended
        self._recovery_ends: float | None = None
        self._fruitless = 0  # epochs in a row that ended before any of their steps was done
        self._closed = False
        self._draining = False
        self._counters = StepCounters()
        self._stats_due = 0.0
        self._told_idle = True

    # The main loop

    def run(self) -> None:
        """Until Close."""
        if hasattr(self._executor, "on_lost"):  # a remote group can fall while no step asks it anything
            self._executor.on_lost = lambda lost: self._inbox.put(_EpochEnded(self._former.joining, str(lost)))
        self._former.start(0, None)
        try:
            while not self._closed:
                self._take_items()
                self._expire()
                self._launch_steps()
                self._tell()
        finally:
            self._former.close()
            self._executor.close()

    def _take_items(self) -> None:
        """Wait for the next thing to happen and take everything that has."""
        started = self._clock()
        try:
            item = self._inbox.get(timeout=self._patience_s(started))
        except Empty:
            return
        finally:
            self._counters.idle_s += self._clock() - started
        try:
            while True:
                self._take(item)
                item = self._inbox.get_nowait()
        except Empty:
            pass

    def _patience_s(self, now: float) -> float | None:
        """How long nothing is due by the clock; None: for ever."""
        deadline = self._core.next_deadline if self._core is not None else None
        due = [when for when in (deadline, self._recovery_ends) if when is not None]
        return max(0.0, min(due) - now) + CLOCK_S if due else None

    def _take(self, item: Item) -> None:
        now = self._clock()
        if isinstance(item, _StepDone):
            self._commit(item, now)
        elif isinstance(item, Submit):
            self._submit(item.request, now)
        elif isinstance(item, Cancel):
            if item.key in self._live and self._core is not None:
                self._core.cancel(item.key, now)
        elif isinstance(item, StopChoice):
            if item.key in self._live and self._core is not None:
                self._core.stop(item.key, item.choice, item.num_tokens, now)
        elif isinstance(item, Drain):
            self._drain(item.now, now)
        elif isinstance(item, AskStats):
            self._notices.append(StatsReport(item.ticket, self._stats()))
        elif isinstance(item, _EpochEnded):
            self._fallen = item
            self._lose(item.epoch, item.reason, now)
        elif isinstance(item, Formed):
            self._serve(item.facts, now)
        elif isinstance(item, NotFormed):
            self._change_state(EngineState.FAILED if item.fatal else self._state, item.reason)
        else:
            self._closed = True

    def _launch_steps(self) -> None:
        """Keep the pipeline full."""
        if self._core is None or self._state is not EngineState.SERVING:
            return
        while len(self._in_flight) < self._config.pipeline_depth:
            started = self._clock()
            batch = self._core.plan(started)
            if batch is None:
                return
            sent = self._clock()
            self._counters.plan_s += sent - started
            self._in_flight[batch.seq] = sent
            epoch = self._epoch
            future = self._executor.step(batch)
            future.add_done_callback(lambda done, epoch=epoch: self._inbox.put(_StepDone(epoch, done)))  # type: ignore[misc]

    def _tell(self) -> None:
        if self._core is not None:
            self._add_events(self._core.take_events())
            if self._config.check_invariants:
                self._core.check_invariants()
        now = self._clock()
        idle = not self._live
        if self._core is not None and (now >= self._stats_due if not idle else not self._told_idle):
            self._stats_due = now + STATS_S
            self._notices.append(StatsReport(0, self._stats()))
        self._told_idle = idle
        if self._notices:
            notices, self._notices = self._notices, []
            self._emit(notices)

    # Requests

    def _submit(self, request: Request, now: float) -> None:
        if self._core is None or self._state is EngineState.FAILED:
            self._refuse(request.key, RefusalKind.UNAVAILABLE, f"the engine is {self._state.value}")
            return
        if self._state is EngineState.RECOVERING and self._recovery_ends is None:
            self._refuse(request.key, RefusalKind.UNAVAILABLE, "the workers were lost and are not back yet")
            return
        try:
            self._core.submit(request, now)
        except NeverFits as refusal:
            self._refuse(request.key, RefusalKind.INVALID, str(refusal), refusal.field)
        except Duplicate as refusal:
            self._refuse(request.key, RefusalKind.DUPLICATE, str(refusal))
        except Overloaded as refusal:
            self._refuse(request.key, RefusalKind.OVERLOADED, str(refusal), retry_after_s=refusal.retry_after_s)
        except Draining as refusal:
            self._refuse(request.key, RefusalKind.UNAVAILABLE, str(refusal))
        except Refusal as refusal:
            self._refuse(request.key, RefusalKind.INVALID, str(refusal), refusal.field)
        else:
            self._live[request.key] = request.n

    def _refuse(self, key: int, kind: RefusalKind, message: str, field: str = "", retry_after_s: float = 0.0) -> None:
        self._notices.append(Refused(key, kind, message, field, retry_after_s))

    def _expire(self) -> None:
        now = self._clock()
        if self._core is not None and self._live:
            self._core.expire(now)
        if self._recovery_ends is not None and now > self._recovery_ends:
            logger.error("no group within %g s: %d requests end", self._config.recovery_timeout_s, len(self._live))
            self._recovery_ends = None
            if self._core is not None:
                self._core.end_all(FinishReason.UNAVAILABLE, now)

    def _drain(self, at_once: bool, now: float) -> None:
        self._draining = True
        if self._core is not None:
            self._core.drain()
            if at_once:
                self._core.end_all(FinishReason.DRAINED, now)

    def _add_events(self, events: StepEvents, result: StepResult | None = None, sent: float = 0.0) -> None:
        for finished in events.finished:
            left = self._live[finished.key] - 1
            if left:
                self._live[finished.key] = left
            else:
                del self._live[finished.key]
        if len(events.tokens.keys) or events.scores or events.logits or events.finished:
            if result is None:
                self._notices.append(Stepped(events))
            else:
                self._notices.append(
                    Stepped(events, result.epoch, result.seq, sent, self._clock(), result.run_ms, result.wait_ms)
                )

    # Steps

    def _commit(self, done: _StepDone, now: float) -> None:
        if done.epoch != self._epoch or self._state is not EngineState.SERVING:
            self._counters.late_results += 1
            return
        error = done.future.exception()
        if error is not None:
            self._lose(done.epoch, str(error), now)
            return
        result = done.future.result()
        assert self._core is not None
        sent = self._in_flight.pop(result.seq)
        self._add_events(self._core.commit(result, now), result, sent)
        self._fruitless = 0
        counters = self._counters
        counters.steps += 1
        counters.commit_s += self._clock() - now
        counters.step_s += now - sent
        counters.worker_run_s += result.run_ms / 1000
        counters.worker_wait_s += result.wait_ms / 1000

    # Groups

    def _lose(self, epoch: int, reason: str, now: float) -> None:
        if epoch != self._epoch or self._state is not EngineState.SERVING:
            return
        assert self._core is not None
        logger.error("epoch %d is lost with %d requests live: %s", epoch, len(self._live), reason)
        self._in_flight.clear()
        self._counters.recoveries += 1
        self._recovery_ends = now + self._config.recovery_timeout_s
        self._fruitless += 1
        if self._fruitless >= FRUITLESS_EPOCHS and self._live:
            logger.error("%d epochs in a row ended in their first steps: what runs ends", self._fruitless)
            self._core.end_all(FinishReason.UNAVAILABLE, now)
        self._change_state(EngineState.RECOVERING, reason)
        self._former.start(self._epoch, self._facts)

    def _serve(self, facts: EngineFacts, now: float) -> None:
        """A group stands."""
        if self._core is not None and self._facts is not None and facts.fingerprint != self._facts.fingerprint:
            self._core.end_all(FinishReason.UNAVAILABLE, now)  # those that waited while no group stood
            self._add_events(self._core.take_events())
            self._core = None
        if self._core is None:
            self._core = self._make_core(facts)
            if self._draining:
                self._core.drain()
        else:
            self._core.abort_step(facts.epoch, now)
        self._facts, self._epoch = facts, facts.epoch
        self._recovery_ends = None
        logger.info("epoch %d serves: %d blocks of %d tokens", facts.epoch, facts.num_blocks, facts.block_size)
        self._state = EngineState.SERVING
        self._notices.append(StateChanged(EngineState.SERVING, "", facts))
        self._told_idle = False
        if self._fallen is not None:
            self._lose(self._fallen.epoch, self._fallen.reason, now)

    def _make_core(self, facts: EngineFacts) -> Scheduler:
        config = CoreConfig(
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            max_num_seqs=facts.max_num_seqs,
            max_batch_tokens=facts.max_batch_tokens,
            max_seq_len=facts.max_seq_len,
            max_queue=self._config.max_queue,
            max_queued_tokens=self._config.max_queued_tokens,
            pipeline_depth=self._config.pipeline_depth,
            sample_at_scheduler=self._config.sample_at_scheduler,
            prefix_cache=self._config.prefix_cache,
            forecast=self._config.forecast,
            watermark=self._config.watermark,
            ageing_s=self._config.ageing_s,
            order=self._config.order,
            fair_tenants=self._config.fair_tenants,
            epoch=facts.epoch,
        )
        if not self._config.decision_log:
            return Scheduler(config)
        return RecordedScheduler(
            config, DecisionFiles(Path(self._config.decision_log), self._config.decision_log_bytes)
        )

    def _change_state(self, state: EngineState, reason: str) -> None:
        self._state = state
        self._notices.append(StateChanged(state, reason))

    def _stats(self) -> Mapping[str, float]:
        values = self._counters.values() | {"engine_epoch": self._epoch, "steps_in_flight": len(self._in_flight)}
        return values | core_values(self._core.stats()) if self._core is not None else values
