"""The tensor-parallel group of one epoch on CUDA: memory that ranks share within one host, NCCL across hosts.

Knows how ranks meet and which of the two they get, always its own store, never torch's global group. Collectives run on
the current stream, so that they can be captured in a graph. The order of sums is `ops/leaves.py`, whoever moves the
numbers. NVLink multicast stays off: its switches add in an order of their own.
"""

import logging
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from protos.step import GroupConfig
from worker_svc.config import WorkerConfig
from worker_svc.cuda.collective_kernels import RANKS as MOST_RANKS
from worker_svc.cuda.peer_memory import IpcMemory, exchange
from worker_svc.cuda.symmetric import CUT, SymmetricGroup
from worker_svc.ops.leaves import LeafPart, fold_across
from worker_svc.parallel.group import Group, GroupLost, host_store, join_store

logger = logging.getLogger(__name__)
BOOT_ID = "/proc/sys/kernel/random/boot_id"  # one a host


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

    def check(self) -> None:
        if self._group is None:
            raise GroupLost("the group was aborted")

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


def sum_across(leaves: Tensor, part: LeafPart, group: Group, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """The fold of all ranks' leaves (+ bias), rounded once. leaves: [C, ..., N] fp32, those of `part` or, where they
    are a node of the tree, their sum alone."""
    if isinstance(group, SymmetricGroup):
        return group.sum_leaves(leaves.contiguous(), part, dtype, bias)
    total = fold_across(list(leaves.unbind(0)), part, group)
    return (total if bias is None else total + bias).to(dtype)


class _OnCuda:
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
        device = torch.device(self._config.device)
        device = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
        torch.cuda.set_device(device)
        return form_group(
            self._store, self._config.rank, self._config.tp, device, self._group.epoch, self._group.step_timeout_s
        )


def form_group(store: Store, rank: int, tp: int, device: torch.device, epoch: int, timeout_s: float) -> Group:
    """Shared memory where every rank reaches every other's, as within one host, else NCCL. Raises GroupLost."""
    try:
        memory, refusal = _meet(store, rank, tp, device, timeout_s)
    except RuntimeError as error:
        raise GroupLost(f"epoch {epoch}: rank {rank} met nobody: {error}") from error
    if memory is None:
        logger.warning("epoch %d: over NCCL, since memory cannot be shared: %s", epoch, refusal)
        return NcclGroup(store, rank, tp, epoch, timeout_s)
    group = SymmetricGroup(memory, rank, tp, device, timeout_s)
    group.barrier()
    return group


def _meet(store: Store, rank: int, tp: int, device: torch.device, timeout_s: float) -> tuple[IpcMemory | None, str]:
    """Memory that all share, or why not; every rank comes to the same end."""
    boots = exchange(store, "boot", rank, tp, _host_name(), timeout_s)
    if len(set(boots)) > 1:
        return None, "ranks are on several hosts"
    if tp > MOST_RANKS:
        return None, f"{tp} ranks are more than {MOST_RANKS}"
    memory, refusal = None, ""
    try:
        memory = IpcMemory(store, rank, tp, CUT.region_bytes, device, timeout_s)
    except RuntimeError as error:
        refusal = str(error)
    refusals = exchange(store, "shared", rank, tp, refusal.encode(), timeout_s)
    refused = b"; ".join(word for word in refusals if word).decode()
    return (None if refused else memory), refused


def _host_name() -> bytes:
    try:
        return Path(BOOT_ID).read_bytes()
    except OSError:
        return socket.gethostname().encode()


def open_cuda_rendezvous(config: WorkerConfig, host: str, group: GroupConfig, store_address: str) -> _OnCuda:
    """`host`: how the other ranks reach this one. Raises OSError, RuntimeError or ValueError."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    return _OnCuda(config, host, group, store_address)
