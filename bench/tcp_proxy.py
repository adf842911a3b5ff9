"""A TCP proxy that misbehaves when told to: it drops, delays, truncates or swallows what it carries.

Knows bytes and connections, nothing of what they mean. Each connection is two pumps; the behaviour is asked for at
every chunk, so it changes in the middle of a message, as a network does.
"""

import contextlib
import socket
import struct
import threading
import time

CHUNK = 16 << 10
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: a close that the other side sees as a reset


class TcpProxy:
    """Listens on a loopback port and carries to `target` (host, port)."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._delay_s = 0.0
        self._open = threading.Event()
        self._open.set()
        self._truncate = False
        self._closed = False
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def cut(self) -> None:
        """Reset every connection; new ones are taken."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            self._drop(pair)

    def truncate(self) -> None:
        """Carry half of the next chunk and reset its connection."""
        self._truncate = True

    def delay(self, seconds: float) -> None:
        """From now on every chunk arrives so much later; 0 ends it."""
        self._delay_s = seconds

    def swallow(self, swallow: bool = True) -> None:
        """Carry nothing, without a word to either side, until told otherwise."""
        (self._open.clear if swallow else self._open.set)()

    def close(self) -> None:
        self._closed = True
        self._open.set()
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self._closed:
                client, _ = self._listening.accept()
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target, timeout=5)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        pair = (client, server)
        with self._lock:
            self._pairs.add(pair)
        for source, sink in (pair, pair[::-1]):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._pump, args=(source, sink, pair), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, pair: tuple[socket.socket, socket.socket]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                if self._delay_s:
                    time.sleep(self._delay_s)
                self._open.wait()
                if self._truncate and len(data) > 1:
                    self._truncate = False
                    sink.sendall(data[: len(data) // 2])
                    break
                sink.sendall(data)
        self._drop(pair)

    def _drop(self, pair: tuple[socket.socket, socket.socket]) -> None:
        with self._lock:
            self._pairs.discard(pair)
        for end in pair:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                end.close()
