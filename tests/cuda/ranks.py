"""Ranks as processes, over memory that they share: of GPUs (one for all if there are too few), else of the host."""

import mmap
import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch._C._distributed_c10d import FileStore

from tests.cuda.interpreted import hasten
from worker_svc.cuda.peer_memory import IpcMemory, PeerMemory, exchange
from worker_svc.cuda.symmetric import Cut, SymmetricGroup

LIMIT_S = 15.0  # of a GPU's waits
RANKS = multiprocessing.get_context("forkserver")  # ranks of all tests share the seconds of importing
RANKS.set_forkserver_preload([__name__, "worker_svc.cuda.runner", "worker_svc.models"])


class HostMemory:
    """One file a rank, mapped by all."""

    def __init__(self, folder: Path, tp: int, num_bytes: int) -> None:
        self._maps = []
        for rank in range(tp):
            with (folder / str(rank)).open("r+b") as file:
                self._maps.append(np.frombuffer(mmap.mmap(file.fileno(), num_bytes), np.uint8))
        self.addresses = tuple(m.ctypes.data for m in self._maps)


def _rank(work: Callable[[SymmetricGroup, torch.device], None], folder: Path, rank: int, tp: int, cut: Cut) -> None:
    try:
        memory: PeerMemory
        if torch.cuda.is_available():
            device = torch.device("cuda", rank % torch.cuda.device_count())
            store = FileStore(str(folder / "store"), tp)
            memory = IpcMemory(store, rank, tp, cut.region_bytes, device, 60.0)
        else:
            hasten()
            device = torch.device("cpu")
            memory = HostMemory(folder, tp, cut.region_bytes)
        work(SymmetricGroup(memory, rank, tp, device, LIMIT_S, cut), device)
        if torch.cuda.is_available():
            exchange(store, "end", rank, tp, b"", 60.0)  # nobody gives memory back that another still reads
    except BaseException:
        (folder / "error").write_text(f"rank {rank}: {traceback.format_exc()}")
        os._exit(1)


def together(work: Callable[[SymmetricGroup, torch.device], None], folder: Path, tp: int, cut: Cut) -> None:
    for rank in range(tp):
        (folder / str(rank)).write_bytes(bytes(cut.region_bytes))
    ranks = [RANKS.Process(target=_rank, args=(work, folder, rank, tp, cut)) for rank in range(tp)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(200)
    alive = [process for process in ranks if process.is_alive()]
    for process in alive:
        process.kill()
    error = folder / "error"
    assert not alive and not any(process.exitcode for process in ranks), error.read_text() if error.exists() else alive
