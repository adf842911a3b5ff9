"""What a caller asks of the core: token ids in, normalised settings, no text.

The front end has validated every field against the model before a Request exists; the core refuses only what depends
on its own state (bounds, duplicates, what can never fit).
"""

from dataclasses import dataclass, field

from protos.step import Int32s, RowSampling


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """One request of `n` choices. `key` is the caller's handle for events; ids and choices name it to people.

    Args:
        prompt: [tokens] int32, at least one.
        max_tokens: output tokens of each choice, resumed ones included; 0 scores the prompt only.
        eos_ids, stop_token_ids: both end a choice; apart because the finish says which, and ignore_eos drops the first
            (the caller passes () then). `sampling.stop_ids` holds their union for the min_tokens mask.
        resume: per choice the output tokens that the client already holds; empty for a new request.
        deadline: on the clock that `plan` is given; None: none.
    """

    key: int
    request_id: str
    prompt: Int32s
    sampling: RowSampling
    seed: int
    max_tokens: int
    n: int = 1
    eos_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    prompt_logprobs: int | None = None
    resume: tuple[Int32s, ...] = ()
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    deadline: float | None = None
    arrival: float = field(default=0.0)


class Refusal(Exception):
    """A request that the core does not take; nothing of it remains. `field` names the request field at fault."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class NeverFits(Refusal):
    """Larger than the whole pool or the context: INVALID_ARGUMENT, both numbers in the message."""


class Duplicate(Refusal):
    """Its request id is live: ALREADY_EXISTS."""


class Overloaded(Refusal):
    """A bound is reached: RESOURCE_EXHAUSTED."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Draining(Refusal):
    """No new requests: UNAVAILABLE."""
