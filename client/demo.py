"""`make demo`: the demo model behind a scheduler and a worker, one question through the chat template, everything
stopped again.

Knows the commands that a person would type, and types them. Invariant: no process outlives it, also when it fails;
what went wrong is printed with the services' last lines.
"""

import collections
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from client.blocking import Lockstep
from client.errors import LockstepError
from client.requests import Chat

QUESTION = "What is the capital of France?"
READY = "lockstep-up: ready on "
READY_S = 120.0


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


class Services:
    """`lockstep-up` as a child process: one scheduler, one worker."""

    def __init__(self, model: str) -> None:
        command = shutil.which("lockstep-up", path=str(Path(sys.executable).parent)) or "lockstep-up"
        self._began = time.monotonic()
        self._lines: collections.deque[str] = collections.deque(maxlen=40)
        self._ready = threading.Event()
        self.address = ""
        self._process = subprocess.Popen(
            [command, "--model", model, "--listen", "127.0.0.1:0", "--numerics", "fast"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches us, and we stop it in order
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.rstrip())
            if READY in line:
                self.address = line.partition(READY)[2].split()[0]
                self._ready.set()
        self._ready.set()  # it ended

    def wait(self) -> float:
        """Seconds until the services were ready. Raises DemoError."""
        if not self._ready.wait(READY_S) or not self.address:
            said = "\n  ".join(self._lines)
            raise DemoError(f"the services did not start within {READY_S:.0f} s; they said:\n  {said}")
        return time.monotonic() - self._began

    def processes(self) -> dict[int, str]:
        """Process ids and names of lockstep-up and of all that descends from it."""
        parents, names = {}, {}
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                name, _, rest = entry.read_text().partition("(")[2].rpartition(")")
                if rest.split()[0] != "Z":
                    names[int(entry.parent.name)], parents[int(entry.parent.name)] = name, int(rest.split()[1])
            except (OSError, ValueError, IndexError):
                continue  # it ended while we looked
        family = {self._process.pid} & set(names)
        while grown := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= grown
        return {pid: names[pid] for pid in family}

    def stop(self) -> None:
        """Ends all of them: asked first, then made to. Raises DemoError if it had to make them."""
        family = self.processes()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            pass
        left = {pid: name for pid, name in family.items() if _name_of(pid) == name}
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        self._process.wait(5.0)
        if left:
            raise DemoError(f"had to kill {left}")


def _name_of(pid: int) -> str | None:
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        return name if rest.split()[0] != "Z" else None
    except OSError:
        return None


def model_folder() -> str:
    """The demo model's snapshot, made if need be. Raises DemoError."""
    command = [sys.executable, "-m", "worker_svc.loading.demo_model"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise DemoError("the demo model could not be made; the lines above say why")
    return done.stdout.strip().splitlines()[-1]


def run() -> None:
    """The whole demo. Raises DemoError, LockstepError."""
    services = Services(model_folder())
    try:
        took = services.wait()
        print(f"ready after {took:.1f} s: {', '.join(sorted(services.processes().values()))}")
        print(f"> {QUESTION}")
        with Lockstep(services.address) as client:
            question = Chat([{"role": "user", "content": QUESTION}])
            with client.stream(question, max_tokens=64, temperature=0.0) as stream:
                for delta in stream:
                    print(delta.text, end="", flush=True)
        print(f"\n({stream.completion.usage.completion_tokens} tokens)")
        if "Paris" not in stream.completion.text:
            raise DemoError("the answer should have said Paris")
    finally:
        services.stop()


def main() -> None:
    """Exit code 0: it answered."""
    try:
        run()
    except (DemoError, LockstepError, OSError) as error:
        raise SystemExit(f"make demo: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print("the services are stopped; next: README.md, 'What to do next'")


if __name__ == "__main__":
    main()
