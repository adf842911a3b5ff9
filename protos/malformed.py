"""Bytes that are no message of the expected kind, on their way through a server: what both services make of them.

gRPC answers such bytes itself, UNKNOWN or INTERNAL with a traceback in the log, though they say nothing about the
server. So a deserializer here never fails: it returns a Malformed, and the interceptors of the services (scheduler_svc
for asyncio, worker_svc for threads) raise it where the handler would have read the message, and answer
INVALID_ARGUMENT.
"""

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError


class Malformed(ValueError):
    """The peer sent something that is no message of the method's kind; the text says which kind was due."""


def tolerant(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """The same deserializer, returning a Malformed instead of raising DecodeError."""
    kind = getattr(getattr(deserializer, "__self__", None), "DESCRIPTOR", None)
    name = kind.full_name if kind is not None else "message of this method"

    def read(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError:
            return Malformed(f"{len(data)} bytes that are not a {name}")

    return read


def checked(message: Any) -> Any:
    """The message; raises it when it is a Malformed."""
    if isinstance(message, Malformed):
        raise message
    return message
