"""The engine: steps in, results out, over one Runner. What `scheduler_svc.executor.Executor` asks for.

Knows epochs and their two threads: the launch thread applies batches and starts their work, the reply thread waits for
it and answers, so that a device has its next step queued while the host reads the last one. Does not know gRPC, models
or tokens. Invariant: results leave in the order of their batches, and once an epoch has ended every future of it,
past and coming, that has no result raises EpochLost.
"""

import logging
import time
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from threading import Lock, Thread

from protos.step import Description, EpochLost, GroupConfig, StepBatch, StepResult, step_digest
from worker_svc.parallel.group import Group, GroupLost, SingleGroup
from worker_svc.runner import Pending, Runner

logger = logging.getLogger(__name__)
CLOSE_S = 10.0  # a step on its way may take so long, and is then left alone


class LocalExecutor:
    """The engine in this process; one epoch at a time."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._epoch: _Epoch | None = None
        self._joining = Lock()

    def describe(self) -> Description:
        epoch = self._epoch
        joined = epoch is not None and epoch.ended is None
        return replace(self._runner.describe(), epoch=epoch.config.epoch if epoch is not None and joined else 0)

    def join(self, config: GroupConfig, group: Group | None = None) -> int:
        """Start an epoch over `group` (None: this process alone) with every slot empty; the number of KV blocks."""
        self.end()
        with self._joining:  # callers may overlap: one that waits here for a step to end, and the next one
            if self._epoch is not None and not self._epoch.wait_until_idle(config.step_timeout_s):
                raise EpochLost(f"epoch {self._epoch.config.epoch} is still in a step and cannot be left")
            if self._epoch is not None and self._epoch.config.epoch >= config.epoch:
                raise EpochLost(f"epoch {self._epoch.config.epoch} was joined before epoch {config.epoch} could be")
            group = group if group is not None else SingleGroup()
            num_blocks = self._runner.join(config, group)
            self._epoch = _Epoch(config, self._runner, group)
            return num_blocks

    def leave(self, epoch: int) -> None:
        """End this epoch and no other."""
        current = self._epoch
        if current is not None and current.config.epoch == epoch:
            current.end("left")

    def step(self, batch: StepBatch) -> Future[StepResult]:
        if self._epoch is None:
            return _failed(EpochLost("no epoch is joined"))
        return self._epoch.step(batch)

    def end(self) -> None:
        """End the epoch, if there is one, without waiting for a step that runs."""
        if self._epoch is not None:
            self._epoch.end("left")

    def close(self) -> None:
        """End, and wait for a step that runs: a thread in a library's code would take an ending interpreter down."""
        self.end()
        if self._epoch is not None:
            self._epoch.wait_until_idle(CLOSE_S)


class _Epoch:
    def __init__(self, config: GroupConfig, runner: Runner, group: Group) -> None:
        self.config = config
        self.ended: EpochLost | None = None
        self._runner = runner
        self._group = group
        self._lock = Lock()
        self._waiting: SimpleQueue[tuple[StepBatch, float, Future[StepResult]] | None] = SimpleQueue()
        self._running: SimpleQueue[tuple[int, Pending, float, float, Future[StepResult]] | None] = SimpleQueue()
        self._threads = (
            Thread(target=self._launch_steps, name=f"launch-{config.epoch}", daemon=True),
            Thread(target=self._answer_steps, name=f"reply-{config.epoch}", daemon=True),
        )
        for thread in self._threads:
            thread.start()

    def step(self, batch: StepBatch) -> Future[StepResult]:
        if batch.epoch != self.config.epoch:
            return _failed(EpochLost(f"step of epoch {batch.epoch} in epoch {self.config.epoch}"))
        future: Future[StepResult] = Future()
        with self._lock:
            if self.ended is not None:
                return _failed(self.ended)
            self._waiting.put((batch, time.monotonic(), future))
        return future

    def end(self, reason: str) -> None:
        """No further step starts; one that hangs in a collective is torn out of it. Idempotent."""
        with self._lock:
            if self.ended is not None:
                return
            self.ended = EpochLost(f"epoch {self.config.epoch}: {reason}")
            self._waiting.put(None)
        self._group.abort()

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Whether both threads have ended; only then may another epoch use the runner."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _launch_steps(self) -> None:
        while (item := self._waiting.get()) is not None:
            batch, received, future = item
            if self.ended is not None:
                future.set_exception(self.ended)
                continue
            started = time.monotonic()
            try:
                pending = self._runner.launch(batch)
            except Exception as error:  # whatever it was, the ranks are no longer in lockstep
                future.set_exception(self._end_at(batch.seq, error))
                continue
            self._running.put((batch.seq, pending, received, started, future))
        self._running.put(None)

    def _answer_steps(self) -> None:
        while (item := self._running.get()) is not None:
            seq, pending, received, started, future = item
            try:
                result = pending.result()
            except Exception as error:
                future.set_exception(self._end_at(seq, error))
                continue
            future.set_result(
                replace(
                    result,
                    digest=step_digest(
                        result.epoch, result.seq, result.token_ids, result.logprobs, result.failed_slots
                    ),
                    run_ms=(time.monotonic() - started) * 1e3,
                    wait_ms=(started - received) * 1e3,
                )
            )

    def _end_at(self, seq: int, error: Exception) -> EpochLost:
        lost = self.ended
        if lost is None:
            # a rank that is gone is news about the network; anything else is about this code
            trace = None if isinstance(error, GroupLost) else error
            logger.error("epoch %d: step %d failed: %s", self.config.epoch, seq, error, exc_info=trace)
            self.end(f"step {seq} failed: {type(error).__name__}: {error}")
            lost = self.ended
        assert lost is not None
        return lost


def _failed(error: EpochLost) -> Future[StepResult]:
    future: Future[StepResult] = Future()
    future.set_exception(error)
    return future
