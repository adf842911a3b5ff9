"""The tensor-parallel group of one epoch on CUDA: NCCL, its own process group and store, never torch's global one.

Knows how ranks meet and how numbers move on the current stream, so that a collective can be captured in a graph. Adds
nothing up: the order of sums is `ops/leaves.py`. NVLink multicast stays off: its switches add in an order of their own.
"""

import os
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from protos.step import GroupConfig
from worker_svc.config import WorkerConfig
from worker_svc.parallel.group import Group, GroupLost, host_store, join_store


class NcclGroup:
    """`store` and the communicator belong to this epoch alone. Raises GroupLost where a peer does not come."""

    def __init__(self, store: Store, rank: int, tp: int, epoch: int, timeout_s: float) -> None:
        from torch._C._distributed_c10d import ProcessGroupNCCL  # not in builds for CPU

        self.rank = rank
        self.tp = tp
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        try:
            self._group: Any = ProcessGroupNCCL(PrefixStore(f"epoch-{epoch}", store), rank, tp, options)
            self.barrier()  # makes the communicator, which a capture could not
        except RuntimeError as error:
            raise GroupLost(f"epoch {epoch}: rank {rank} could not join: {error}") from error

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = torch.empty((self.tp, *x.shape), dtype=x.dtype, device=x.device)
        self._run(lambda group: group._allgather_base(gathered.view(-1), x.contiguous().view(-1)))
        return gathered

    def all_reduce(self, x: Tensor) -> Tensor:
        self._run(lambda group: group.allreduce([x]))
        return x

    def barrier(self) -> None:
        self.all_gather(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()

    def abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def close(self) -> None:
        self.abort()

    def _run(self, start: Any) -> None:
        group = self._group
        if group is None:
            raise GroupLost("the group was aborted")
        try:
            start(group).wait()  # the current stream waits, not the host
        except RuntimeError as error:
            raise GroupLost(str(error)) from error


class _OverNccl:
    """One rank's part in forming a group; rank 0 hosts the store on the address that others reach it by."""

    def __init__(self, config: WorkerConfig, host: str, group: GroupConfig, store_address: str) -> None:
        self._config, self._group = config, group
        if config.rank == 0:
            self._store = host_store(host, group.step_timeout_s)
            self.address = f"{host}:{self._store.port}"
        else:
            store_host, _, port = store_address.rpartition(":")
            self._store = join_store(store_host, int(port), group.step_timeout_s)
            self.address = store_address

    def form(self) -> Group:
        group = self._group
        if (device := torch.device(self._config.device)).index is not None:
            torch.cuda.set_device(device)
        return NcclGroup(self._store, self._config.rank, self._config.tp, group.epoch, group.step_timeout_s)


def open_nccl_rendezvous(config: WorkerConfig, host: str, group: GroupConfig, store_address: str) -> _OverNccl:
    """`host`: how the other ranks reach this one. Raises OSError, RuntimeError or ValueError."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    return _OverNccl(config, host, group, store_address)
