"""`lockstep-up`: a whole cluster on this machine, one scheduler and N workers as supervised child processes.

Knows processes: it starts them under names that people can read, restarts what dies or freezes, passes SIGTERM on, and
leaves nothing behind, whatever ends it (the kernel kills children whose parent is gone). Knows no model, no request.

    starting --the scheduler says that it serves--> up --SIGTERM--> draining --children gone--> exit
    A child that ends while starting ends the whole command with its code; later it is restarted, unless its code (2)
    says that it would end so again.
"""

import argparse
import contextlib
import os
import random
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from worker_svc import launch

READY_MARK = "lockstep-scheduler: serving"  # how the scheduler's line on stdout begins once its health is SERVING
EXIT_REFUSED = 2  # of a child: options, snapshot or memory do not allow it, now or after a restart
SECRET_VARIABLE = "LOCKSTEP_WORKER_SECRET"
PROBE_EVERY_S = 0.5
FROZEN_AFTER_S = 1.5  # a child that is stopped (SIGSTOP) for this long is replaced
RESTART_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0)  # after so many short lives in a row
SHORT_LIFE_S = 10.0
KILL_AFTER_S = 5.0  # from SIGTERM to SIGKILL of a worker, which has nothing to finish


class Child:
    """One process that must be there. `process` is None between a death and the restart.

    Args:
        piped: its output is for us to read. log: its output is appended there. Neither: it is ours.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: dict[str, str],
        *,
        piped: bool = False,
        log: Path | None = None,
    ) -> None:
        self.name = name
        self._log = log
        self._command = list(command)
        self._environment = environment
        self._piped = piped
        self.process: subprocess.Popen[bytes] | None = None
        self.pidfd = -1
        self.restart_at: float | None = None
        self._started = 0.0
        self._short_lives = 0
        self._stopped_since: dict[int, float] = {}  # pid -> when it was first seen stopped

    def start(self) -> None:
        output = self._log.open("ab") if self._log is not None else None
        self.process = subprocess.Popen(
            launch.tied(self._command),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if self._piped else output,
            stderr=output,
            start_new_session=True,  # Ctrl-C reaches us alone, and we pass it on in order
        )
        if output is not None:
            output.close()
        self.pidfd = os.pidfd_open(self.process.pid)
        self._started, self.restart_at = time.monotonic(), None

    def reap(self) -> int:
        """The exit code of a process that has ended; decides when it may start again."""
        assert self.process is not None
        code = self.process.wait()
        os.close(self.pidfd)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.process = None
        now = time.monotonic()
        self._short_lives = self._short_lives + 1 if now - self._started < SHORT_LIFE_S else 0
        self.restart_at = now + RESTART_BACKOFF_S[min(self._short_lives, len(RESTART_BACKOFF_S) - 1)]
        return code

    def signal(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)

    def frozen(self) -> list[int]:
        """The process and those below it that have been stopped for longer than a moment."""
        if self.process is None:
            return []
        now = time.monotonic()
        stopped = {pid for pid in _family(self.process.pid) if _is_stopped(pid)}
        self._stopped_since = {pid: self._stopped_since.get(pid, now) for pid in stopped}
        return [pid for pid, since in self._stopped_since.items() if now - since >= FROZEN_AFTER_S]


class Supervisor:
    """Keeps the children alive until it is told to stop; `run` returns the exit code."""

    def __init__(self, scheduler: Child, workers: Sequence[Child], ready_line: str) -> None:
        self._scheduler = scheduler
        self._workers = list(workers)
        self._ready_line = ready_line
        self._serving = False
        self._draining = False
        self._exit_code = 0
        self._kill_workers_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._output = b""

    def run(self) -> int:
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, _ignore)  # the wake-up pipe tells the loop
        self._selector.register(self._wake_read, selectors.EVENT_READ, "signal")
        for child in self._children():
            self._start(child)
        try:
            while any(child.process is not None for child in self._children()) or not self._draining:
                for key, _ in self._selector.select(PROBE_EVERY_S if not self._draining else 0.1):
                    if key.data == "signal":
                        self._on_signals(os.read(self._wake_read, 64))
                    elif key.data == "output":
                        self._on_output(key.fd)
                    else:
                        self._on_death(key.data)
                self._tend()
        finally:
            for child in self._children():
                child.signal(signal.SIGKILL)
        return self._exit_code

    def _children(self) -> list[Child]:
        return [*self._workers, self._scheduler]

    def _start(self, child: Child) -> None:
        child.start()
        assert child.process is not None
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        if child.process.stdout is not None:
            self._selector.register(child.process.stdout.fileno(), selectors.EVENT_READ, "output")

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGCHLD:
                continue
            if self._draining:  # asked twice: do not wait for anything
                for child in self._children():
                    child.signal(signal.SIGKILL)
            self._drain()

    def _drain(self) -> None:
        """The scheduler finishes what runs; the workers end when it has ended."""
        if self._draining:
            return
        self._draining = True
        if self._scheduler.process is not None:
            self._scheduler.signal(signal.SIGTERM)
        else:
            self._stop_workers()

    def _stop_workers(self) -> None:
        for worker in self._workers:
            worker.signal(signal.SIGTERM)
        self._kill_workers_at = time.monotonic() + KILL_AFTER_S

    def _on_output(self, fd: int) -> None:
        data = os.read(fd, 1 << 16)
        if not data:
            self._selector.unregister(fd)
            return
        *lines, self._output = (self._output + data).split(b"\n")
        for line in lines:
            print(line.decode(errors="replace"), flush=True)
            if line.startswith(READY_MARK.encode()) and not self._serving:
                self._serving = True
                print(self._ready_line, flush=True)

    def _on_death(self, child: Child) -> None:
        assert child.process is not None
        self._selector.unregister(child.pidfd)
        if child.process.stdout is not None and child.process.stdout.fileno() in self._selector.get_map():
            self._on_output(child.process.stdout.fileno())
            if child.process.stdout.fileno() in self._selector.get_map():
                self._selector.unregister(child.process.stdout.fileno())
        code = child.reap()
        if self._draining:
            if child is self._scheduler:
                self._exit_code = self._exit_code or code
                self._stop_workers()
            return
        ending = f"signal {-code}" if code < 0 else f"code {code}"
        if not self._serving or code == EXIT_REFUSED:
            why = "while starting" if not self._serving else "and would again: what it said last says why"
            print(f"lockstep-up: {child.name} ended with {ending} {why}", file=sys.stderr, flush=True)
            self._exit_code = code if code > 0 else 1
            self._drain()
            return
        print(f"lockstep-up: {child.name} ended with {ending}; restarting it", file=sys.stderr, flush=True)

    def _tend(self) -> None:
        """What is due by the clock: restarts, frozen children, workers that do not stop."""
        now = time.monotonic()
        if self._draining:
            if self._kill_workers_at is not None and now >= self._kill_workers_at:
                for worker in self._workers:
                    worker.signal(signal.SIGKILL)
            return
        for child in self._children():
            if child.process is None and child.restart_at is not None and now >= child.restart_at:
                self._start(child)
            for pid in child.frozen():
                print(f"lockstep-up: {child.name} is frozen (pid {pid}); replacing it", file=sys.stderr, flush=True)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _family(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                yield from _family(int(child))


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _ignore(_number: int, _frame: FrameType | None) -> None:
    pass


def free_port(host: str) -> int:
    """A port outside the range from which the kernel gives ports to outgoing connections, so that it stays free."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(200):
        port = random.randrange(max(1024, low - 20_000), low) if low > 4096 else 0
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            found: int = probe.getsockname()[1]
            return found
    raise OSError(f"no free port on {host}")


def _command(script: str, module: str) -> list[str]:
    """The console script beside this interpreter, whose name shows in the process list, or else the module."""
    installed = Path(sys.executable).parent / script
    return [sys.executable, str(installed)] if installed.exists() else [sys.executable, "-m", module]


def device_of(device: str, rank: int, tp: int) -> str:
    """A GPU for each rank of a group; one alone takes the one that it is told, or the process's first."""
    return f"cuda:{rank}" if device == "cuda" and tp > 1 else device


def devices_of(device: str, listed: str | None, tp: int) -> list[str]:
    """A device for each rank. listed: GPUs by rank, "0,0,1,1"; one may come more than once. Raises SystemExit."""
    if listed is None:
        return [device_of(device, rank, tp) for rank in range(tp)]
    indices = listed.split(",")
    if device != "cuda" or len(indices) != tp or not all(index.isdigit() for index in indices):
        raise SystemExit(f"lockstep-up: --devices names a GPU for each of {tp} ranks, with --device cuda")
    return [f"cuda:{index}" for index in indices]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep-up",
        description="Serve a model on this machine: one scheduler and N workers, supervised.",
        epilog="Every other option goes to lockstep-scheduler as it is; see lockstep-scheduler --help.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face snapshot folder")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="workers, each with one shard (default 1)")
    parser.add_argument("--listen", default="127.0.0.1:50051", metavar="HOST:PORT", help="port 0 takes a free one")
    parser.add_argument("--device", default="cpu", help="cpu or cuda, where each worker takes a GPU (default cpu)")
    parser.add_argument(
        "--devices",
        metavar="I,J,...",
        help="GPUs by rank; ranks may share one (slow, for trials: give --kv-blocks as well). Default: 0,1,...",
    )
    parser.add_argument("--tp-invariant", action="store_true", help="on CUDA: the same bits with any --tp, at a price")
    parser.add_argument("--dtype", help="float32, bfloat16 or float64; default: the checkpoint's")
    parser.add_argument("--kv-dtype", choices=("float32", "bfloat16"), help="of keys and values; default: the model's")
    parser.add_argument("--numerics", default="invariant", choices=("invariant", "fast"))
    parser.add_argument("--no-cuda-graphs", action="store_true", help="launch kernels one by one: for debugging")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of each worker; default: cores / tp")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    options, others = _parser().parse_known_args(arguments)
    if options.tp < 1:
        raise SystemExit("lockstep-up: --tp is at least 1")
    launch.name_process("lockstep-up")
    host, _, port = options.listen.rpartition(":")
    listen = f"{host}:{int(port) or free_port(host)}"
    addresses = [f"127.0.0.1:{free_port('127.0.0.1')}" for _ in range(options.tp)]
    devices = devices_of(options.device, options.devices, options.tp)
    threads = options.threads or max(1, launch.available_cores() // options.tp)
    # a secret of this run alone, in the environment because command lines are public
    environment = {**os.environ, SECRET_VARIABLE: secrets.token_hex(16)}
    shared = ["--numerics", options.numerics]
    if options.dtype:
        shared += ["--dtype", options.dtype]
    if options.kv_dtype:
        shared += ["--kv-dtype", options.kv_dtype]
    if options.tp_invariant:
        shared.append("--tp-invariant")
    if options.no_cuda_graphs:
        shared.append("--no-cuda-graphs")
    workers = [
        Child(
            f"lockstep-worker rank {rank}",
            [
                *_command("lockstep-worker", "worker_svc.app"),
                *("--listen", address, "--model", options.model, "--rank", str(rank), "--tp", str(options.tp)),
                *("--threads", str(threads), "--device", devices[rank], *shared),
            ],
            environment,
        )
        for rank, address in enumerate(addresses)
    ]
    scheduler = Child(
        "lockstep-scheduler",
        [
            *_command("lockstep-scheduler", "scheduler_svc.app"),
            *("--listen", listen, "--workers", ",".join(addresses), *others),
        ],
        environment,
        piped=True,
    )
    ready_line = f"lockstep-up: ready on {listen}"
    raise SystemExit(Supervisor(scheduler, workers, ready_line).run())


if __name__ == "__main__":
    main()
