"""The real thing for tests: `lockstep-up` with its scheduler and workers as processes on a free loopback port."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from worker_svc import launch

READY = "lockstep-up: ready on "
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Command:
    """One of our commands as a process, its output kept line by line. Leaves no process, or says so."""

    def __init__(self, name, *arguments, prefix=(), environment=None, **flags):
        self.command = [*prefix, sys.executable, str(Path(sys.executable).parent / name), *arguments]
        for flag, value in flags.items():
            self.command += [f"--{flag.replace('_', '-')}", *([] if value is True else [str(value)])]
        self._environment = {**os.environ, **(environment or {})}
        self.output = []
        self._line = threading.Condition()

    def __enter__(self):
        self.process = subprocess.Popen(
            launch.tied(self.command),  # killed also when the test run itself is
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_):
        self.stop()

    def _read(self):
        for line in self.process.stdout:
            with self._line:
                self.output.append(line.rstrip("\n"))
                self._line.notify_all()
        with self._line:
            self.output.append("")
            self._line.notify_all()

    def wait_for_line(self, text, timeout_s=150, after=0):
        """The index of the first line from `after` on that holds the text."""

        def found():
            return next((i for i, line in enumerate(self.output) if i >= after and text in line), None)

        with self._line:
            self._line.wait_for(lambda: found() is not None or self.process.poll() is not None, timeout_s)
            self._line.wait_for(lambda: found() is not None, 1)
            assert found() is not None, f"{text!r} never came from {' '.join(self.command)}:\n{self.text}"
            return found()

    @property
    def text(self):
        return "\n".join(self.output)

    @property
    def pid(self):
        return self.process.pid

    def pids(self, name=""):
        """Processes below this one whose command line holds `name`."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        found = []
        for child in children:
            try:
                if name in " ".join(child.cmdline()):
                    found.append(child.pid)
            except psutil.NoSuchProcess:
                pass
        return found

    def stop(self, timeout_s=30, signals=1):
        """SIGTERM, as an operator would; the exit code. Everything below is gone afterwards, or the test fails."""
        below = [psutil.Process(pid) for pid in self.pids()] if self.process.poll() is None else []
        for _ in range(signals):
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                time.sleep(0.2 if signals > 1 else 0)
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            code = None
        alive = wait_until_gone(below, 5)
        for child in alive:
            child.kill()
        self._reader.join(5)
        assert code is not None, f"{self.command[1]} did not end within {timeout_s} s:\n{self.text}"
        assert not alive, f"left behind: {alive}\n{self.text}"
        return code


class Cluster(Command):
    """Runs `lockstep-up --model model_dir --tp tp`, with flags as keywords (`max_num_seqs=8` is --max-num-seqs 8).

    A flag of True is given without a value. `output` holds every line of all processes so far.
    """

    def __init__(self, model_dir, tp=1, *, ready_timeout_s=180, environment=None, **flags):
        flags = {"model": model_dir, "tp": tp, "listen": "127.0.0.1:0", "threads": 1} | flags
        super().__init__("lockstep-up", environment=environment, **flags)
        self._ready_timeout_s = ready_timeout_s

    def __enter__(self):
        super().__enter__()
        try:
            line = self.wait_for_line(READY, self._ready_timeout_s)
        except AssertionError:
            self.process.kill()
            self.stop()
            raise
        self.address = self.output[line].removeprefix(READY).strip()
        return self

    @property
    def scheduler_pid(self):
        return self.pids("lockstep-scheduler")[0]

    @property
    def engine_pid(self):
        return self.pids("lockstep-engine")[0]

    def worker_pid(self, rank=0):
        return self.pids(f"--rank {rank} ")[0]


def health(address, service=""):
    """The serving status at this moment; None when nobody answers."""
    with grpc.insecure_channel(address) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=2)
        except grpc.RpcError:
            return None
        return reply.status


def wait_for_health(address, status, timeout_s):
    """Seconds until the health is as wanted."""
    started = time.monotonic()
    while health(address) != status:
        assert time.monotonic() - started < timeout_s, f"health was never {status} within {timeout_s} s"
        time.sleep(0.05)
    return time.monotonic() - started


def wait_until_gone(processes, timeout_s):
    """Those that still run at the end of the time."""
    deadline = time.monotonic() + timeout_s
    while (alive := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive


def _runs(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
