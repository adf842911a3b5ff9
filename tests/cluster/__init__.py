"""The real thing for tests: `lockstep-up` with its scheduler and workers as processes on a free loopback port."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

READY = "lockstep-up: ready on "


class Cluster:
    """Runs `lockstep-up --model model_dir --tp tp`, with flags as keywords (`max_num_seqs=8` is --max-num-seqs 8).

    A flag of True is given without a value. `output` holds every line of all processes so far. Leaves no process.
    """

    def __init__(self, model_dir, tp=1, *, ready_timeout_s=90, environment=None, **flags):
        self.command = [sys.executable, str(Path(sys.executable).parent / "lockstep-up")]
        self.command += ["--model", str(model_dir), "--tp", str(tp), "--listen", flags.pop("listen", "127.0.0.1:0")]
        for name, value in ({"threads": 1} | flags).items():
            self.command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        self._ready_timeout_s = ready_timeout_s
        self._environment = environment
        self._ready = threading.Event()
        self.output = []
        self.address = ""

    def __enter__(self):
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self._environment
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(self._ready_timeout_s) or not self.address:
            self.stop()
            raise AssertionError(f"{' '.join(self.command)} did not become ready:\n{self.text}")
        return self

    def __exit__(self, *_):
        self.stop()

    def _read(self):
        for line in self.process.stdout:
            self.output.append(line.rstrip("\n"))
            if line.startswith(READY):
                self.address = line.removeprefix(READY).strip()
                self._ready.set()
        self._ready.set()

    @property
    def text(self):
        return "\n".join(self.output)

    def pids(self, name=""):
        """Processes below lockstep-up whose command line holds `name`."""
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

    @property
    def scheduler_pid(self):
        return self.pids("lockstep-scheduler")[0]

    def worker_pid(self, rank=0):
        return self.pids(f"--rank {rank} ")[0]

    def stop(self, timeout_s=30):
        """SIGTERM, as an operator would; the exit code. Everything below is gone afterwards, or the test fails."""
        below = [psutil.Process(pid) for pid in self.pids()] if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            code = None
        deadline = time.monotonic() + 5
        while (alive := [child for child in below if _runs(child)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        for child in alive:
            child.kill()
        self._reader.join(5)
        assert code is not None, f"lockstep-up did not end within {timeout_s} s:\n{self.text}"
        assert not alive, f"left behind: {alive}\n{self.text}"
        return code


def _runs(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
