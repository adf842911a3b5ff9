"""Structured logs: one line an event, request ids and counts, never a prompt and never an answer.

Whoever reads stderr may stop reading. Lines are therefore written by a thread of their own, from a bounded queue: a
full pipe costs lines, which are counted, and never holds up the thread that logs.
"""

import atexit
import json
import logging
import queue
import threading
import time
from typing import Any

from google.rpc import code_pb2

from protos import generation_pb2 as pb
from scheduler_svc.streams import Stream

MAX_WAITING_LINES = 10_000
LAST_WORDS_S = 1.0

requests = logging.getLogger("lockstep.requests")


class JsonLines(logging.Formatter):
    """Each record as one JSON object; what was passed as `extra={"fields": {...}}` lies at the top level."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class TextLines(logging.Formatter):
    """For people: the message, then name=value."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name}: %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        return " ".join([super().format(record), *(f"{name}={_visible(value)}" for name, value in fields.items())])


def _visible(value: Any) -> str:
    """What a client named something, on one line and without a terminal's commands."""
    text = str(value)
    return text if text.isprintable() else text.encode("unicode_escape").decode()


class Background(logging.Handler):
    """Hands records to a thread that formats and writes them with `handler`."""

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__()
        self._handler = handler
        self._waiting: queue.Queue[logging.LogRecord] = queue.Queue(MAX_WAITING_LINES)
        self._lost = 0
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._lost += 1

    def finish(self) -> None:
        """Wait a moment for what is still to be written."""
        deadline = time.monotonic() + LAST_WORDS_S
        while self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.005)

    def _write(self) -> None:
        while True:
            record = self._waiting.get()
            lost, self._lost = self._lost, 0
            if lost:
                gap = logging.LogRecord(record.name, logging.WARNING, "", 0, "%d lines are missing here", (lost,), None)
                self._handler.handle(gap)
            self._handler.handle(record)
            self._waiting.task_done()


def set_up(name: str, style: str, level: int = logging.INFO) -> None:
    """`style` is text or json; lines go to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if style == "json" else TextLines(name))
    background = Background(handler)
    atexit.register(background.finish)
    logging.basicConfig(level=level, handlers=[background], force=True)


def log_request(stream: Stream, usage: pb.Usage, now: float) -> None:
    """One line when a request has ended."""
    if not requests.isEnabledFor(logging.INFO):
        return
    request = stream.request
    first = stream.first_token_at
    fields = {
        "request_id": request.request_id,
        "status": code_pb2.Code.Name(stream.failure.code) if stream.failure is not None else "OK",
        "finish": ",".join(choice.reason.value if choice.reason is not None else "none" for choice in stream.choices),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "queue_ms": round(usage.queue_ms, 1),
        "ttft_ms": None if first is None else round((first - request.arrival) * 1000, 1),
        "total_ms": round((now - request.arrival) * 1000, 1),
    }
    if request.tenant:
        fields["tenant"] = request.tenant
    requests.info("request", extra={"fields": fields})
