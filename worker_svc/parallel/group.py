"""The tensor-parallel group of one epoch: how a rank's numbers reach the others.

Knows stores and process groups; a group is an argument everywhere, never torch.distributed's global one, so that two
engines and two epochs fit in one process. Does not know what is sent. Invariant: data moves, nothing is added here (the
order of sums is `ops/leaves.py`), except `all_reduce`, which `fast` numerics uses and `invariant` never does.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

SLICE = timedelta(seconds=0.25)  # how late a wait notices an abort


class GroupLost(RuntimeError):
    """A collective failed: a rank died, hung past the step timeout, or the group was aborted."""


class Group(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def tp(self) -> int: ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[tp, *x.shape], by rank. Shapes are equal on every rank. Raises GroupLost."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks in an order of the library's choice. Raises GroupLost."""
        ...

    def barrier(self) -> None: ...

    def check(self) -> None:
        """Raises GroupLost where a collective has ended without its peers; on CPU it raises that itself."""
        ...

    def abort(self) -> None:
        """From any thread: collectives in flight on this rank fail soon. Idempotent."""
        ...

    def close(self) -> None: ...


class SingleGroup:
    """One rank: nothing moves."""

    rank = 0
    tp = 1

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def barrier(self) -> None:
        pass

    def check(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


class GlooGroup:
    """Ranks on CPU. `store` and the process group belong to this epoch alone."""

    def __init__(self, store: Store, rank: int, tp: int, epoch: int, timeout_s: float, hostname: str) -> None:
        self.rank = rank
        self.tp = tp
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=hostname)]
        options._timeout = self._timeout
        try:
            self._group: Any = ProcessGroupGloo(PrefixStore(f"epoch-{epoch}", store), rank, tp, options)
        except RuntimeError as error:
            raise GroupLost(f"epoch {epoch}: rank {rank} could not join: {error}") from error

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = torch.empty((self.tp, *x.shape), dtype=x.dtype)
        source = x if x.is_contiguous() else x.contiguous()
        if x.numel():
            self._run(lambda group: group._allgather_base(gathered.view(-1), source.view(-1)))
        return gathered

    def all_reduce(self, x: Tensor) -> Tensor:
        self._run(lambda group: group.allreduce([x]))
        return x

    def barrier(self) -> None:
        self._run(lambda group: group.barrier())

    def check(self) -> None:
        pass

    def abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def close(self) -> None:
        self.abort()

    def _run(self, start: Callable[[Any], Any]) -> None:
        group = self._group
        if group is None:
            raise GroupLost("the group was aborted")
        try:
            work = start(group)
        except RuntimeError as error:
            raise GroupLost(str(error)) from error
        try:
            self._wait(work)
        except RuntimeError as error:
            if not work.is_completed():
                _keep_until_done(group, work)
            raise GroupLost("the group was aborted" if self._group is None else str(error)) from error

    def _wait(self, work: Any) -> None:
        """In slices, since gloo's abort wakes nobody who waits for a peer that says nothing. Raises RuntimeError."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        while True:
            try:
                work.wait(min(SLICE, self._timeout))
                return
            except RuntimeError:
                if work.is_completed() or self._group is None or time.monotonic() >= deadline:
                    raise


def _keep_until_done(group: Any, work: Any) -> None:
    """Destroying a gloo group waits for what is in flight on it, up to the step timeout; nobody else shall wait."""

    def keep() -> None:
        with contextlib.suppress(RuntimeError):
            work.wait()
        assert group is not None  # held until here

    threading.Thread(target=keep, name="gloo-end", daemon=True).start()


def host_store(hostname: str, timeout_s: float) -> TCPStore:
    """The rendezvous store of one epoch, hosted in this process on a port of the system's choice (`store.port`).

    TCPStore by itself listens on every address of the host; this one only where the other ranks are told to come.
    """
    listening = socket.create_server((hostname, 0))
    port = listening.getsockname()[1]
    return TCPStore(
        hostname,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        multi_tenant=False,
        master_listen_fd=listening.detach(),  # the store closes it
    )


def join_store(hostname: str, port: int, timeout_s: float) -> TCPStore:
    """Raises GroupLost if nobody answers there in time."""
    try:
        return TCPStore(hostname, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, TimeoutError) as error:
        raise GroupLost(f"no rendezvous store at {hostname}:{port}: {error}") from error
