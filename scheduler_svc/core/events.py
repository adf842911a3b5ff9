"""What the core tells the front end after a step: columns for what every row does, objects for what is rare."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from protos.step import NO_FLOATS, NO_INTS, Float32s, Floats, Int32s

NO_KEYS: NDArray[np.int64] = np.array([], np.int64)


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"  # the caller's own doing; nobody waits for it
    TIMEOUT = "timeout"
    DRAINED = "drained"
    NAN = "nan"  # the row's logits held a NaN
    UNAVAILABLE = "unavailable"  # the workers did not come back in time


@dataclass(frozen=True, eq=False, slots=True)
class Tokens:
    """One token for each listed choice, N in all. logprobs is 0 where not asked for.

    alternative_counts[i] entries of the flat alternatives belong to token i.
    """

    keys: NDArray[np.int64] = field(default_factory=lambda: NO_KEYS)
    choices: Int32s = field(default_factory=lambda: NO_INTS)
    token_ids: Int32s = field(default_factory=lambda: NO_INTS)
    logprobs: Float32s = field(default_factory=lambda: NO_FLOATS)
    alternative_counts: Int32s = field(default_factory=lambda: NO_INTS)
    alternative_ids: Int32s = field(default_factory=lambda: NO_INTS)
    alternative_logprobs: Float32s = field(default_factory=lambda: NO_FLOATS)


@dataclass(frozen=True, eq=False, slots=True)
class PromptScores:
    """Scores of prompt tokens first_position .. first_position + len(logprobs) - 1 of choice 0; each arrives once."""

    key: int
    first_position: int
    logprobs: Float32s
    alternative_ids: Int32s  # [len(logprobs) * k] flat
    alternative_logprobs: Float32s


@dataclass(frozen=True, eq=False, slots=True)
class LogitsRow:
    """The logits [V] that a choice's token of this step was drawn from."""

    key: int
    choice: int
    logits: Floats


@dataclass(frozen=True, eq=False, slots=True)
class Finished:
    """The terminal event of one choice; exactly one for each choice of each accepted request.

    `completion_tokens` counts resumed tokens too. `stop_token_id` is set when a token ended the choice.
    """

    key: int
    choice: int
    reason: FinishReason
    completion_tokens: int
    cached_tokens: int
    queue_s: float  # from arrival to first admission
    stop_token_id: int | None = None


@dataclass(frozen=True, eq=False, slots=True)
class StepEvents:
    """Everything that one step told. `finished` comes after the tokens of the same step."""

    tokens: Tokens = field(default_factory=Tokens)
    scores: tuple[PromptScores, ...] = ()
    logits: tuple[LogitsRow, ...] = ()
    finished: tuple[Finished, ...] = ()
