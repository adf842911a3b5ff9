"""What crosses between the front end and the engine loop, in one process (embedded) or over one pipe.

Commands go to the loop, notices come back, both in order. Everything is a frozen value that pickles.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from protos.step import Description
from scheduler_svc.core.events import StepEvents
from scheduler_svc.core.request import Request


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends one request, whatever it is doing; nobody waits for what it would still say."""

    key: int


@dataclass(frozen=True, slots=True)
class StopChoice:
    """A stop string was completed by token number `num_tokens` of a choice, counted from 1."""

    key: int
    choice: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Take nothing new. `now`: also end what runs."""

    now: bool = False


@dataclass(frozen=True, slots=True)
class AskStats:
    ticket: int


@dataclass(frozen=True, slots=True)
class Close:
    pass


Command = Submit | Cancel | StopChoice | Drain | AskStats | Close


class EngineState(Enum):
    STARTING = "starting"
    SERVING = "serving"
    RECOVERING = "recovering"
    DRAINING = "draining"
    FAILED = "failed"


class RefusalKind(Enum):
    INVALID = "invalid"
    DUPLICATE = "duplicate"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the loop found out when the group was formed; the front end validates against it."""

    description: Description
    epoch: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_batch_tokens: int
    max_seq_len: int
    sample_at: str
    fingerprint: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StateChanged:
    state: EngineState
    reason: str = ""
    facts: EngineFacts | None = None  # with SERVING


@dataclass(frozen=True, slots=True)
class Refused:
    key: int
    kind: RefusalKind
    message: str
    field: str = ""
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a step told, or what ended without one (seq 0). Times are on the monotonic clock of this host."""

    events: StepEvents
    epoch: int = 0
    seq: int = 0
    sent: float = 0.0
    done: float = 0.0
    run_ms: float = 0.0
    wait_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class StatsReport:
    """A snapshot of counters and gauges, by metric name without the prefix. ticket 0: unasked."""

    ticket: int
    values: Mapping[str, float]


Notice = StateChanged | Refused | Stepped | StatsReport
