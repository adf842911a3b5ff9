"""The engine loop in a process of its own, and the front end's handle to it: one pipe, frozen values, both directions.

The child is `python -m scheduler_svc.engine_process FD lockstep-engine`: a fresh interpreter (never a fork of one that
runs gRPC), whose last argument only makes it easy to find in a process list. It ends when its parent does, since the
pipe ends then. Signals are the parent's business: a child that died at Ctrl-C could not drain.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Protocol

from scheduler_svc import logs
from scheduler_svc.engine_config import EngineConfig
from scheduler_svc.executor import Executor
from scheduler_svc.loop import EngineLoop, Inbox
from scheduler_svc.messages import Close, Command, Notice

logger = logging.getLogger(__name__)

PIPE_BUFFER_BYTES = 4 << 20
MAX_UNHANDLED = 64  # batches of notices that the front end has not handled; then the engine waits for it
CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class EngineStart:
    """The first message to the child. `make_executor` pickles by name: a function of a module, or a partial of one."""

    config: EngineConfig
    make_executor: Callable[[], Executor]
    log_level: int = logging.INFO
    log_format: str = "text"


class Engine(Protocol):
    """The front end's handle to a running loop."""

    def send(self, command: Command) -> None: ...

    def handled(self) -> None:
        """One batch of notices has been handled."""
        ...

    def close(self) -> None:
        """End the loop and wait for it."""
        ...

    def kill(self) -> None:
        """For those who cannot wait."""
        ...


class EngineProcess:
    """Starts the child. `on_notices` and `on_end` are called on this handle's reader thread.

    Args:
        on_end: the child is gone, with the exit code that it left; not called after close().
    """

    def __init__(
        self,
        start: EngineStart,
        on_notices: Callable[[Sequence[Notice]], object],
        on_end: Callable[[int], object],
    ) -> None:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIPE_BUFFER_BYTES)
        descriptor = theirs.fileno()
        arguments = [sys.executable, "-m", "scheduler_svc.engine_process", str(descriptor), "lockstep-engine"]
        self._child = subprocess.Popen(arguments, pass_fds=[descriptor], stdin=subprocess.DEVNULL)
        theirs.close()
        self._pipe = Connection(ours.detach())
        self._pipe.send(start)
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._unhandled = Semaphore(MAX_UNHANDLED)
        self._on_notices, self._on_end = on_notices, on_end
        self._closing = False
        self._writer = Thread(target=self._write, name="engine-commands", daemon=True)
        self._reader = Thread(target=self._read, name="engine-notices", daemon=True)
        self._writer.start()
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, command: Command) -> None:
        self._commands.put(command)

    def handled(self) -> None:
        self._unhandled.release()

    def kill(self) -> None:
        self._closing = True
        self._child.kill()

    def close(self) -> None:
        self._closing = True
        self.send(Close())
        self._commands.put(None)
        try:
            self._child.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            logger.warning("the engine process does not end; it is killed")
            self._child.kill()
            self._child.wait()
        self._unhandled.release(MAX_UNHANDLED)
        self._writer.join(CLOSE_S)
        self._reader.join(CLOSE_S)
        self._pipe.close()

    def _write(self) -> None:
        """Its own thread, so that a child that does not read cannot hold up the front end."""
        with contextlib.suppress(OSError):
            while (command := self._commands.get()) is not None:
                self._pipe.send(command)

    def _read(self) -> None:
        try:
            while True:
                notices = self._pipe.recv()
                self._unhandled.acquire()
                if self._closing:
                    continue
                self._on_notices(notices)
        except (EOFError, OSError):
            pass
        code = self._child.wait()
        if not self._closing:
            self._on_end(code)


class EngineThread:
    """The same handle over a loop in a thread of this process: the embedded engine, and tests.

    `on_notices` and `on_end` are called on the loop's thread; on_end gets 1 when the loop failed.
    """

    def __init__(
        self,
        start: EngineStart,
        on_notices: Callable[[Sequence[Notice]], object],
        on_end: Callable[[int], object],
    ) -> None:
        self._inbox: Inbox = SimpleQueue()
        self._on_end = on_end
        self.loop = EngineLoop(start.config, start.make_executor(), self._inbox, on_notices)
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        self._inbox.put(command)

    def handled(self) -> None:
        pass

    def close(self) -> None:
        self._inbox.put(Close())
        self._thread.join(CLOSE_S)

    def kill(self) -> None:
        self._inbox.put(Close())

    def _run(self) -> None:
        try:
            self.loop.run()
        except Exception:
            logger.exception("the engine loop failed")
            self._on_end(1)


def _read_commands(pipe: Connection, inbox: Inbox) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            inbox.put(pipe.recv())
    inbox.put(Close())
    # The parent is gone or has closed; a loop that hangs in an executor must not outlive it.
    time.sleep(CLOSE_S)
    os._exit(1)


def main() -> None:
    from worker_svc import launch  # a composition root: names the process

    launch.name_process("lockstep-engine")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe = Connection(int(sys.argv[1]))
    start: EngineStart = pipe.recv()
    logs.set_up("lockstep-engine", start.log_format, start.log_level)
    if start.config.sample_at_scheduler:
        launch.keep_large_buffers()
    inbox: Inbox = SimpleQueue()
    Thread(target=_read_commands, args=(pipe, inbox), name="commands", daemon=True).start()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        EngineLoop(start.config, start.make_executor(), inbox, pipe.send).run()


if __name__ == "__main__":
    main()
