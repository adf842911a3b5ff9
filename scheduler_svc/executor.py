"""The seam between decisions and mathematics: whatever runs a step.

worker_svc.engine.LocalExecutor is the engine in this process, remote.RemoteExecutor a group of workers over gRPC, and
tests bring a fake. The loop knows only this.
"""

from concurrent.futures import Future
from typing import Any, Protocol

from protos.step import Description, EpochLost, GroupConfig, StepBatch, StepResult

__all__ = ["EpochLost", "Executor"]


class Executor(Protocol):
    def describe(self) -> Description:
        """Facts of the model as rank 0 states them; waits until every rank has loaded. Raises EpochLost."""
        ...

    def join(self, config: GroupConfig) -> int:
        """Form a fresh group with every slot empty, ending any other; the number of KV blocks. Raises EpochLost."""
        ...

    def step(self, batch: StepBatch) -> Future[StepResult]:
        """Queue one step; results come in order. The future raises EpochLost when the epoch has ended."""
        ...

    def close(self) -> None:
        """Dissolve the group. Idempotent."""
        ...


class ExecutorOver:
    """What every executor over another one passes through, so that it says only what it adds."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        """What else the executor offers."""
        return getattr(self._executor, name)

    @property
    def on_lost(self) -> Any:
        """A remote executor's news of losses between steps; no attribute where the executor has none."""
        return self._executor.on_lost  # type: ignore[attr-defined]

    @on_lost.setter
    def on_lost(self, callback: Any) -> None:
        self._executor.on_lost = callback  # type: ignore[attr-defined]

    def describe(self) -> Description:
        return self._executor.describe()

    def close(self) -> None:
        self._executor.close()
