"""The client library in one place: what `from client import ...` gives.

    with Lockstep("127.0.0.1:50051") as client:
        for delta in client.stream("Once upon a time", max_tokens=32):
            print(delta.text, end="")

Everything else is in the module that owns it: requests.py (what can be asked), results.py (what comes back),
errors.py (what can go wrong), retry.py (how a lost connection is met), run.py (how a stream is taken up again).
"""

from client.asynchronous import AsyncLockstep, AsyncStream
from client.blocking import Lockstep, Stream
from client.channel import Tls
from client.errors import (
    Aborted,
    DeadlineExceeded,
    Denied,
    FingerprintMismatch,
    InvalidRequest,
    LockstepError,
    Overloaded,
    ServerError,
    Unreachable,
)
from client.requests import Chat, Options, build
from client.results import Alternative, Choice, Completion, Delta, Fingerprint, Finish, PromptToken, Usage
from client.retry import NEVER, RetryPolicy

__all__ = [
    "NEVER",
    "Aborted",
    "Alternative",
    "AsyncLockstep",
    "AsyncStream",
    "Chat",
    "Choice",
    "Completion",
    "DeadlineExceeded",
    "Delta",
    "Denied",
    "Fingerprint",
    "FingerprintMismatch",
    "Finish",
    "InvalidRequest",
    "Lockstep",
    "LockstepError",
    "Options",
    "Overloaded",
    "PromptToken",
    "RetryPolicy",
    "ServerError",
    "Stream",
    "Tls",
    "Unreachable",
    "Usage",
    "build",
]
