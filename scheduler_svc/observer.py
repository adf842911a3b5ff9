"""Who hears what happens in the front end: metrics, logs, traces."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from google.rpc.status_pb2 import Status

from scheduler_svc.messages import EngineState, Stepped
from scheduler_svc.streams import Stream


class Observer(Protocol):
    """Hears what happens, for metrics and logs."""

    def admitted(self, stream: Stream) -> None: ...

    def refused(self, status: Status) -> None: ...

    def refused_late(self, stream: Stream, status: Status) -> None:
        """The core did not take a request that had been admitted here."""
        ...

    def tokens(self, count: int, first_token_s: Sequence[float], gaps_s: Sequence[float]) -> None: ...

    def stepped(self, stream: Stream, stepped: Stepped) -> None:
        """A request that is traced got a token."""
        ...

    def ended(self, stream: Stream, now: float) -> None: ...

    def state(self, state: EngineState, reason: str) -> None: ...

    def stats(self, values: Mapping[str, float]) -> None: ...
