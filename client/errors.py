"""What can go wrong for a caller, as types, and how a gRPC failure becomes one.

    LockstepError              `code` is the gRPC status name, `partial` what had arrived
    +-- InvalidRequest         the request is at fault; `fields` says which field and why
    +-- Denied                 no or wrong credentials
    +-- FingerprintMismatch    the server's bits would differ from those already received or expected
    +-- Overloaded             the queue stayed full for longer than the policy's patience
    +-- Unreachable            no scheduler answered for longer than the policy's patience
    +-- DeadlineExceeded       the request's own deadline
    +-- Aborted                somebody ended the request: Abort, or a drain that could wait no longer
    +-- ServerError            the server's fault (a NaN row, a bug)

A `Failure` is the wire's word before anything is decided: retry.py decides whether it is final.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
from google.rpc import error_details_pb2, status_pb2

if TYPE_CHECKING:
    from client.results import Completion


class LockstepError(Exception):
    """A request that did not end well."""

    def __init__(self, message: str, code: str = "UNKNOWN", fields: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.fields = dict(fields or {})
        self.partial: Completion | None = None


class InvalidRequest(LockstepError):
    """INVALID_ARGUMENT and its kin."""


class Denied(LockstepError):
    """UNAUTHENTICATED, PERMISSION_DENIED."""


class FingerprintMismatch(LockstepError):
    """FAILED_PRECONDITION of `expected_fingerprint`, or a first event under another fingerprint."""


class Overloaded(LockstepError):
    """RESOURCE_EXHAUSTED."""


class Unreachable(LockstepError):
    """UNAVAILABLE."""


class DeadlineExceeded(LockstepError):
    """DEADLINE_EXCEEDED."""


class Aborted(LockstepError):
    """CANCELLED or ABORTED by somebody else."""


class ServerError(LockstepError):
    """INTERNAL and everything unforeseen."""


_TYPES: dict[str, type[LockstepError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "OUT_OF_RANGE": InvalidRequest,
    "NOT_FOUND": InvalidRequest,
    "ALREADY_EXISTS": InvalidRequest,
    "UNIMPLEMENTED": InvalidRequest,
    "UNAUTHENTICATED": Denied,
    "PERMISSION_DENIED": Denied,
    "FAILED_PRECONDITION": FingerprintMismatch,
    "RESOURCE_EXHAUSTED": Overloaded,
    "UNAVAILABLE": Unreachable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Aborted,
    "ABORTED": Aborted,
}

# A cut connection is not always UNAVAILABLE: a proxy or a dying server resets the stream, and gRPC then reports
# these words under INTERNAL, UNKNOWN or CANCELLED.
_CUT = ("RST_STREAM", "GOAWAY", "Stream removed", "Socket closed", "Connection reset", "connection attempt", "HTTP/2")


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt. `retry_after_s` is the server's hint; None: it gave none."""

    code: str
    message: str
    retry_after_s: float | None = None
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def cut(self) -> bool:
        """The connection or the server went away; the request itself was not judged."""
        words = any(word in self.message for word in _CUT)
        return self.code in ("UNAVAILABLE", "CANCELLED") or (self.code in ("INTERNAL", "UNKNOWN") and words)

    def error(self) -> LockstepError:
        """The same as what the caller sees."""
        kind = _TYPES.get(self.code, ServerError)
        if self.cut and kind is not Aborted:
            kind = Unreachable
        return kind(f"{self.code}: {self.message}", self.code, self.fields)


def failure_of_status(status: status_pb2.Status) -> Failure:
    """From a google.rpc.Status: of an event, or of the trailing metadata of a call."""
    retry_after_s, fields = None, {}
    for detail in status.details:
        retry, bad = error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
        if detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
        elif detail.Is(bad.DESCRIPTOR):
            detail.Unpack(bad)
            fields.update({violation.field: violation.description for violation in bad.field_violations})
    name = next((code.name for code in grpc.StatusCode if code.value[0] == status.code), "UNKNOWN")
    return Failure(name, status.message, retry_after_s, fields)


def failure_of_call(error: grpc.RpcError) -> Failure:
    """From what a sync or an aio call raised."""
    trailing: dict[str, bytes | str] = dict(error.trailing_metadata() or ())  # type: ignore[arg-type]
    name = error.code().name
    packed = trailing.get("grpc-status-details-bin")
    if isinstance(packed, bytes):
        status = status_pb2.Status.FromString(packed)
        detailed = failure_of_status(status)
        return Failure(name, error.details() or status.message, detailed.retry_after_s, detailed.fields)
    return Failure(name, error.details() or "no details")
