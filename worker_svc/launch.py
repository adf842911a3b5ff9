"""What a process must settle before torch or grpc is imported: its name, its end, its allocator, its reductions.

Knows Linux and the environment variables of MKL and OpenMP. Imports only the standard library. Invariant: nothing here
has an effect after the libraries it speaks of are loaded, so mains call it first.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3

_libc = ctypes.CDLL(None)


def name_process(name: str) -> None:
    """The name in `ps -o comm`, `top` and `pgrep`; the kernel keeps 15 characters."""
    _libc.prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


# What stands between fork and exec: nothing of ours runs in the forked copy of a process that may hold threads of gRPC,
# whose fork handlers can leave the copy hanging before it gets to exec.
_TIE = f"""import ctypes, os, sys
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {int(signal.SIGKILL)}, 0, 0, 0)
if os.getppid() != int(sys.argv[1]): sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])"""


def tied(command: Sequence[str]) -> list[str]:
    """The command, to be started by this process and killed as soon as the thread that started it ends."""
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command]


def keep_large_buffers() -> None:
    """Messages of megabytes cost mostly page faults when each is mapped and unmapped anew: keep them on the heap."""
    _libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
    _libc.mallopt(M_TRIM_THRESHOLD, 256 << 20)
    _libc.mallopt(M_TOP_PAD, 16 << 20)


def fix_reductions(numerics: str, threads: int) -> None:
    """Environment of MKL and OpenMP for this process; `fast` leaves the order of reductions to the library.

    MKL ignores a mode that it cannot honour, so this is a request: the self-test finds out what holds.
    """
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    # A team that spins between operations starves whoever shares its cores: scheduler, client, other ranks. Measured on
    # two busy cores: a step of 46 ms with passive waiting took seconds without.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if numerics == "invariant":
        os.environ["MKL_CBWR"] = f"{_isa()},STRICT"
    else:
        os.environ.pop("MKL_CBWR", None)


def available_cores() -> int:
    return len(os.sched_getaffinity(0))


def _isa() -> str:
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    names = flags.split()
    return "AVX512" if "avx512f" in names else "AVX2" if "avx2" in names else "COMPATIBLE"
