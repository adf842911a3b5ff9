"""Every error of the public API as a google.rpc.Status: the one mapping from our errors to gRPC codes.

    InvalidRequest, never fits      INVALID_ARGUMENT with BadRequest field violations
    WrongFingerprint                FAILED_PRECONDITION
    duplicate request id            ALREADY_EXISTS
    a bound is reached              RESOURCE_EXHAUSTED with RetryInfo
    not serving, drained, workers lost too long   UNAVAILABLE
    cancelled by Abort              CANCELLED
    timeout_ms or the deadline      DEADLINE_EXCEEDED
    NaN in the logits               INTERNAL

Messages are complete by themselves, since proxies forward only them, and short, since a status travels as metadata, of
which clients take a few kilobytes.
"""

from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2
from google.rpc.status_pb2 import Status

from scheduler_svc.core.events import FinishReason
from scheduler_svc.messages import RefusalKind, Refused
from scheduler_svc.sampling_fields import Violation
from scheduler_svc.validation import InvalidRequest, WrongFingerprint

MAX_VIOLATIONS = 10
MAX_MESSAGE_BYTES = 1000  # as a header carries them: a byte outside of ASCII as %XX
MAX_DESCRIPTION_BYTES = 300


def status(code: int, message: str, *details: Message) -> Status:
    found = Status(code=code, message=_short(message, MAX_MESSAGE_BYTES))
    for detail in details:
        found.details.add().Pack(detail)
    return found


def invalid(violations: Sequence[Violation]) -> Status:
    detail = error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(
                field=one.field, description=_short(one.description, MAX_DESCRIPTION_BYTES)
            )
            for one in violations[:MAX_VIOLATIONS]
        ]
    )
    return status(code_pb2.INVALID_ARGUMENT, "; ".join(map(str, violations)), detail)


def unavailable(message: str) -> Status:
    return status(code_pb2.UNAVAILABLE, message)


def overloaded(message: str, retry_after_s: float) -> Status:
    delay = Duration()
    delay.FromNanoseconds(round(retry_after_s * 1e9))
    return status(code_pb2.RESOURCE_EXHAUSTED, message, error_details_pb2.RetryInfo(retry_delay=delay))


def of_error(error: Exception) -> Status:
    """Of what validation raises."""
    if isinstance(error, InvalidRequest):
        return invalid(error.violations)
    if isinstance(error, WrongFingerprint):
        return status(code_pb2.FAILED_PRECONDITION, str(error))
    raise error


def of_refusal(refused: Refused) -> Status:
    if refused.kind is RefusalKind.INVALID:
        return invalid([Violation(refused.field, refused.message)])
    if refused.kind is RefusalKind.DUPLICATE:
        return duplicate(refused.message)
    if refused.kind is RefusalKind.OVERLOADED:
        return overloaded(refused.message, refused.retry_after_s)
    return unavailable(refused.message)


def duplicate(message: str) -> Status:
    return status(code_pb2.ALREADY_EXISTS, message)


def _short(text: str, limit: int) -> str:
    size, cut = 0, 0  # cut: so many characters leave room for an ellipsis
    for at, character in enumerate(text):
        cut = at if size <= limit - 9 else cut
        size += 1 if " " <= character <= "~" else 3 * len(character.encode("utf-8", "replace"))
        if size > limit:
            return text[:cut] + "…"
    return text


_OF_REASON = {
    FinishReason.CANCELLED: (code_pb2.CANCELLED, "the request was aborted"),
    FinishReason.TIMEOUT: (code_pb2.DEADLINE_EXCEEDED, "the request's time was over before its end"),
    FinishReason.DRAINED: (code_pb2.UNAVAILABLE, "the scheduler is shutting down and its drain time is over"),
    FinishReason.UNAVAILABLE: (code_pb2.UNAVAILABLE, "the workers were lost and did not come back in time"),
    FinishReason.NAN: (code_pb2.INTERNAL, "the model's logits held a NaN"),
}
_GRAVITY = (
    FinishReason.CANCELLED,
    FinishReason.DRAINED,
    FinishReason.TIMEOUT,
    FinishReason.UNAVAILABLE,
    FinishReason.NAN,
)


def of_finish(reasons: Sequence[FinishReason]) -> Status | None:
    """Of a request whose choices ended so; None when all ended well."""
    grave = [reason for reason in reasons if reason in _OF_REASON]
    return status(*_OF_REASON[max(grave, key=_GRAVITY.index)]) if grave else None
