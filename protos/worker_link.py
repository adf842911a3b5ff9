"""What the two ends of the inner service agree on beside its messages: metadata, and logits in shared memory.

Logits between two processes of one host need no copy through gRPC. The writer owns anonymous memory (a memfd), cut into
as many regions as steps may be in flight, and names it /proc/PID/fd/N, which processes of the same user in the same
namespaces can open. It has no name in a file system, so nothing is left behind however either end dies. A region is
written again only when the step that used it has been answered, and the reader copies out before it answers. Whether
the reader can open it is known beforehand, from `host_identity`.
"""

import mmap
import os
import re
from pathlib import Path

import numpy as np

from protos.step import Floats

# Metadata of calls to a worker.
EPOCH_KEY = "lockstep-epoch"  # of Steps: the epoch that the stream steps
SECRET_KEY = "lockstep-secret"  # of everything but health: what makes the caller no stranger
HOST_KEY = "lockstep-host"  # of Steps: the caller's host_identity
CANNOT_FORM_KEY = "lockstep-cannot-form"  # behind the error of Join or Steps: a step.CannotForm

SECRET_VARIABLE = "LOCKSTEP_WORKER_SECRET"  # of the environment: command lines are public

SHARED_FROM_BYTES = 64 << 10  # below this a message is as quick


def host_identity() -> str:
    """Equal for two processes that can open each other's memory by its /proc name; "" where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user", "mnt")]
    except OSError:
        return ""
    return " ".join([boot, *namespaces, str(os.geteuid())])


class LogitsSegment:
    """The writer's end.

    Args:
        region_bytes: the largest result.
        regions: steps that may be in flight.
    """

    def __init__(self, region_bytes: int, regions: int) -> None:
        page = mmap.PAGESIZE
        self._region_bytes = -(-region_bytes // page) * page
        self._regions = regions
        self._next = 0
        self._fd = os.memfd_create("lockstep-logits", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, self._region_bytes * regions)  # pages are taken when they are written
        self._memory = mmap.mmap(self._fd, self._region_bytes * regions)
        self.name = f"/proc/{os.getpid()}/fd/{self._fd}"

    def write(self, logits: Floats) -> int:
        """Copy into the next region; its offset."""
        assert logits.nbytes <= self._region_bytes, (logits.nbytes, self._region_bytes)
        offset = self._next * self._region_bytes
        self._next = (self._next + 1) % self._regions
        target = np.frombuffer(self._memory, logits.dtype, logits.size, offset).reshape(logits.shape)
        np.copyto(target, logits)
        return offset

    def close(self) -> None:
        """The memory itself lives until both ends have let go of it."""
        os.close(self._fd)


class LogitsReader:
    """The reader's end: maps each segment once."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}

    def read(self, name: str, offset: int, size: int) -> bytes:
        """A copy of those bytes. Raises ValueError for a name or bounds that no writer of ours gives."""
        memory = self._maps.get(name)
        if memory is None:
            if not re.fullmatch(r"/proc/[0-9]+/fd/[0-9]+", name):
                raise ValueError(f"{name!r} is no shared memory of a worker")
            try:
                fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ValueError(f"shared memory {name} cannot be opened: {error}") from error
            try:
                memory = self._maps[name] = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
            finally:
                os.close(fd)
        if offset < 0 or offset + size > len(memory):
            raise ValueError(f"{size} bytes at {offset} of shared memory of {len(memory)}")
        return memory[offset : offset + size]
