"""What it means when this rank cannot take its place in a group: is it news about peers, or will it end so again?

Knows the errors of torch and of collectives. Decides nothing: the scheduler counts, a supervisor restarts.
"""

from enum import Enum

import torch

from protos.step import EpochLost
from worker_svc.parallel.group import GroupLost

TEXT_CHARACTERS = 400
_MEMORY_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory")


class JoinFailure(Enum):
    PEERS = "peers"  # they did not come, or left; another try may well succeed
    LASTING = "lasting"  # memory, sizes, or this code: the same again
    DEVICE = "device"  # its context in this process is broken; only a new process can go on


def failure_of(error: Exception, tp: int) -> JoinFailure:
    """Of an error of forming a group of `tp` ranks."""
    if is_memory(error):
        return JoinFailure.LASTING
    if isinstance(error, (GroupLost, EpochLost, OSError)):
        return JoinFailure.PEERS
    if isinstance(error, torch.AcceleratorError):
        return JoinFailure.DEVICE
    # a peer that leaves while collectives are being prepared surfaces as any RuntimeError
    return JoinFailure.PEERS if tp > 1 and isinstance(error, RuntimeError) else JoinFailure.LASTING


def is_memory(error: Exception) -> bool:
    """Of the host or of the device, from whichever allocator."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _MEMORY_SIGNS)


def text_of(error: Exception) -> str:
    """For people, within what a status may hold."""
    first = (str(error).strip() or repr(error)).split("\n")[0][:TEXT_CHARACTERS]
    return f"out of memory: {first}" if is_memory(error) else f"{type(error).__name__}: {first}"
