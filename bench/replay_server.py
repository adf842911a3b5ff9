"""A server that costs next to nothing: ready-made HTTP/2 frames of Generate streams, written to a schedule and logged.

A gRPC server in Python needs more of a core for a message than the client that reads it, so it cannot show what the
client can take. This one knows only as much of HTTP/2 as a gRPC client asks for (RFC 9113: SETTINGS, PING, windows) and
of gRPC as one method needs: every stream is a Generate, its messages are the same bytes, and frames of all streams that
are due leave in one write. Invariants: no window of the client is exceeded, and the log has the time of every message.
"""

import heapq
import select
import socket
import struct
import threading
import time
from typing import Any

from protos import generation_pb2 as pb

DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
INITIAL_WINDOW = 4  # the setting of that name
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FLOOD_BYTES = 64 << 10  # written at once when nothing is scheduled


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """9 bytes of header and the payload."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header field in HPACK's plainest form: without index, without Huffman code."""
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


RESPONSE_HEADERS = b"\x88" + literal("content-type", "application/grpc")  # 0x88: ":status 200" of the static table
TRAILERS = literal("grpc-status", "0")


def enveloped(message: Any) -> bytes:
    """A message as gRPC frames it: not compressed, its length, its bytes."""
    data: bytes = message.SerializeToString()
    return b"\x00" + struct.pack(">I", len(data)) + data


class _Answer:
    """One stream: how many messages it still owes, and when."""

    def __init__(self, number: int, request: pb.GenerateRequest, window: int) -> None:
        self.number, self.window = number, window
        self.name = request.request_id
        self.left = self.total = request.sampling.max_tokens
        self.times = [time.monotonic()]  # of the arrival, then of each message
        plain = enveloped(pb.GenerateEvent(token_ids=[7], text="seven "))
        end = pb.GenerateEvent(token_ids=[7], finish=pb.Finish(reason=pb.FINISH_REASON_LENGTH))
        end.usage.prompt_tokens, end.usage.completion_tokens = 1, self.total
        last = enveloped(end)
        self.cost = max(len(plain), len(last))
        self.frame = frame(DATA, 0, number, plain)
        self.last = frame(DATA, 0, number, last) + frame(HEADERS, END_HEADERS | END_STREAM, number, TRAILERS)

    def due(self, gap: float) -> float:
        """When the next message is: streams do not tick together."""
        began = self.times[0] + gap * (hash(self.name) % 1000) / 1000
        return began + gap * (self.total - self.left + 1)

    def take(self, now: float) -> bytes:
        """The next message, as frames."""
        self.left -= 1
        self.window -= self.cost
        self.times.append(now)
        return self.frame if self.left else self.last


class Replay:
    """Listens on loopback. `gap` is the seconds between two messages of a stream, 0 for as fast as they are taken."""

    def __init__(self) -> None:
        self.gap = 0.0
        self.log: dict[str, list[float]] = {}
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listening.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_Connection(connection, self).run, daemon=True).start()


class _Connection:
    def __init__(self, connection: socket.socket, server: Replay) -> None:
        self._socket, self._server = connection, server
        self._received = b""
        self._out: list[bytes] = [frame(SETTINGS, 0, 0)]
        self._window, self._initial = 65_535, 65_535
        self._requests: dict[int, bytes] = {}
        self._answers: dict[int, _Answer] = {}
        self._schedule: list[tuple[float, int]] = []  # (due, stream), of every answer that owes something

    def run(self) -> None:
        """Until the client leaves."""
        try:
            while True:
                readable, _, _ = select.select([self._socket], [], [], self._patience_s())
                if readable:
                    data = self._socket.recv(1 << 18)
                    if not data:
                        return
                    self._read(data)
                self._write_due()
                if self._out:
                    self._socket.sendall(b"".join(self._out))
                    self._out.clear()
        except OSError:
            return  # the client is gone
        finally:
            self._socket.close()

    def _patience_s(self) -> float | None:
        if not self._schedule or self._window < 1024:
            return None if not self._schedule else 0.05
        if not self._server.gap:
            return 0.0 if any(answer.window >= answer.cost for answer in self._answers.values()) else 0.05
        return max(0.0, self._schedule[0][0] - time.monotonic())

    def _write_due(self) -> None:
        now, gap = time.monotonic(), self._server.gap
        written, blocked = 0, []
        while self._schedule and (self._schedule[0][0] <= now or not gap) and written < FLOOD_BYTES:
            due, number = heapq.heappop(self._schedule)
            answer = self._answers.get(number)
            if answer is None:
                continue
            if min(self._window, answer.window) < answer.cost:
                blocked.append((due, number))
                if self._window < answer.cost:
                    break
                continue
            data = answer.take(now)
            self._window -= answer.cost
            written += len(data)
            self._out.append(data)
            if answer.left:
                heapq.heappush(self._schedule, (answer.due(gap) if gap else now + written * 1e-9, number))
            else:
                self._server.log[answer.name] = self._answers.pop(number).times
        for entry in blocked:
            heapq.heappush(self._schedule, entry)

    def _read(self, data: bytes) -> None:
        self._received += data
        if self._received.startswith(PREFACE[:1]) and len(self._received) >= len(PREFACE):
            self._received = self._received.removeprefix(PREFACE)
        at = 0
        while len(self._received) - at >= 9:
            size = int.from_bytes(self._received[at : at + 3])
            kind, flags, number = struct.unpack_from(">BBI", self._received, at + 3)
            if len(self._received) - at < 9 + size:
                break
            self._take(kind, flags, number & 0x7FFFFFFF, self._received[at + 9 : at + 9 + size])
            at += 9 + size
        self._received = self._received[at:]

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for name, value in struct.iter_unpack(">HI", payload):
                if name == INITIAL_WINDOW:
                    for answer in self._answers.values():
                        answer.window += value - self._initial
                    self._initial = value
            self._out.append(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self._out.append(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            (more,) = struct.unpack(">I", payload)
            if number == 0:
                self._window += more
            elif number in self._answers:
                self._answers[number].window += more
        elif kind == RST_STREAM:
            self._answers.pop(number, None)
        elif kind == HEADERS:
            self._requests[number] = b""
        elif kind == DATA and number in self._requests:
            assert not flags & PADDED
            self._requests[number] += payload
            if payload:
                self._out.append(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", len(payload))))
            if flags & END_STREAM:
                self._begin(number, pb.GenerateRequest.FromString(self._requests.pop(number)[5:]))

    def _begin(self, number: int, request: pb.GenerateRequest) -> None:
        answer = self._answers[number] = _Answer(number, request, self._initial)
        self._out.append(frame(HEADERS, END_HEADERS, number, RESPONSE_HEADERS))
        gap = self._server.gap
        heapq.heappush(self._schedule, (answer.due(gap) if gap else answer.times[0], number))
