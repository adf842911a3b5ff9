"""Memory of one rank that the other ranks of its host read and write: an allocation shared by CUDA's IPC handles.

Knows the driver's calls and how handles are exchanged over an epoch's store. Does not know what is kept there. Handles
work between processes on one device as well as on several that reach each other, which is why they were taken over
torch's symmetric memory: its rendezvous counts calls a process, so that a rank that was replaced never meets the
others again. Invariant: memory is zero when the ranks have met, and is given back when nobody refers to it any more.
"""

import ctypes
import functools
import weakref
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Store

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class PeerMemory(Protocol):
    """addresses: of every rank's memory as this process sees it, by rank."""

    @property
    def addresses(self) -> tuple[int, ...]: ...


class _Handle(ctypes.Structure):
    _fields_ = (("words", ctypes.c_char * HANDLE_BYTES),)


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    """Raises RuntimeError with the driver's word for what went wrong."""
    failed = getattr(_driver(), name)(*arguments)
    if failed:
        word = ctypes.c_char_p()
        _driver().cuGetErrorName(failed, ctypes.byref(word))
        raise RuntimeError(f"{name}: {(word.value or b'?').decode()}")


def exchange(store: Store, name: str, rank: int, tp: int, value: bytes, timeout_s: float) -> list[bytes]:
    """Every rank's value, by rank. Raises RuntimeError where one does not come in time."""
    keys = [f"{name}/{r}" for r in range(tp)]
    store.set(keys[rank], value.hex())
    store.wait(keys, timedelta(seconds=timeout_s))
    return [bytes.fromhex(store.get(key).decode()) for key in keys]


class IpcMemory:
    """`num_bytes` of this rank's device, and where the other ranks' lie. Raises RuntimeError."""

    def __init__(
        self, store: Store, rank: int, tp: int, num_bytes: int, device: torch.device, timeout_s: float
    ) -> None:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # a context on this thread
        own = ctypes.c_uint64()
        _call("cuMemAlloc_v2", ctypes.byref(own), ctypes.c_size_t(num_bytes))
        opened: list[int] = []
        self._finalizer = weakref.finalize(self, _give_back, own.value, opened, device)
        self._finalizer.atexit = False  # the driver takes it back by itself
        _call("cuMemsetD8_v2", own, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
        torch.cuda.synchronize(device)
        handle = _Handle()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), own)
        addresses = []
        for peer, words in enumerate(
            exchange(store, "memory", rank, tp, ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES), timeout_s)
        ):
            if peer == rank:
                addresses.append(own.value)
                continue
            address = ctypes.c_uint64()
            theirs = _Handle.from_buffer_copy(words)
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), theirs, ctypes.c_uint(LAZY_PEER_ACCESS))
            opened.append(address.value)
            addresses.append(address.value)
        self.addresses = tuple(addresses)


def _give_back(own: int, opened: list[int], device: torch.device) -> None:
    """What fails here would fail for a device that is lost, and there is nobody to tell."""
    torch.cuda.synchronize(device)
    for address in opened:
        _driver().cuIpcCloseMemHandle(ctypes.c_uint64(address))
    _driver().cuMemFree_v2(ctypes.c_uint64(own))
