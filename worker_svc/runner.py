"""What runs a step on a device: the seam between the engine's threads and the mathematics.

A runner owns its rank's KV cache, slot table and sampler rows. It knows nothing of gRPC, threads or other epochs: the
engine calls `join` when nothing of an earlier epoch runs any more, and `launch` from one thread, in order.
"""

from typing import Protocol

from protos.step import Description, GroupConfig, StepBatch, StepResult
from worker_svc.parallel.group import Group


class Pending(Protocol):
    """A step that has been started."""

    def result(self) -> StepResult:
        """Wait for the step; called once, from the reply thread. The engine fills digest, run_ms and wait_ms."""
        ...


class Runner(Protocol):
    def describe(self) -> Description:
        """Facts of the loaded model and of this rank; epoch is the engine's business."""
        ...

    def join(self, config: GroupConfig, group: Group) -> int:
        """Forget every slot, allocate a zeroed cache; the number of KV blocks (as many as fit for num_blocks 0)."""
        ...

    def launch(self, batch: StepBatch) -> Pending:
        """Apply the batch and start its work; what it draws is known to the next launch. Errors end the epoch."""
        ...
