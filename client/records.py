"""What is known of one request of a load test, and the figures that many of them give.

Times are seconds from the start of the run on one clock that all client processes share. Only messages that carry at
least one token id count: an empty first message is no first token. Names and definitions are those of
`vllm bench serve`:

    TTFT  first token - sent            TPOT  (E2EL - TTFT) / (n - 1), n > 1
    E2EL  last token - sent             ITL   every gap between successive messages, pooled over requests

beside them `token_gap`: a gap divided by the tokens of its message, once for each; and TTFT and E2EL from the intended
start, which a client that sends late does not shorten. Failed requests count in no latency.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Record:
    """One request as the client saw it. `code` is a gRPC status name."""

    id: str
    due: float
    sent: float = 0.0
    ended: float = 0.0
    code: str = "OK"
    error: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0  # the server's count
    cached_tokens: int = 0
    queue_ms: float = 0.0
    times: list[float] = field(default_factory=list)  # of messages with tokens
    counts: list[int] = field(default_factory=list)  # their tokens

    @property
    def ok(self) -> bool:
        return self.code == "OK"

    @property
    def ttft(self) -> float | None:
        return self.times[0] - self.sent if self.times else None

    @property
    def e2el(self) -> float:
        return (self.times[-1] if self.times else self.ended) - self.sent

    @property
    def tpot(self) -> float | None:
        if self.completion_tokens < 2 or not self.times:
            return None
        return (self.times[-1] - self.times[0]) / (self.completion_tokens - 1)

    def as_json(self) -> dict[str, Any]:
        """For the result file: enough to draw it again."""
        shown = {name: getattr(self, name) for name in self.__slots__}
        for name in ("due", "sent", "ended"):
            shown[name] = round(shown[name], 6)
        shown["times"] = [round(value, 6) for value in self.times]
        return shown


@dataclass(frozen=True, slots=True)
class Goal:
    """What a request must keep to count as good, in milliseconds; all of them."""

    limits: Mapping[str, float] = field(default_factory=dict)

    def met(self, record: Record) -> bool:
        if not record.ok or not record.times:
            return False
        reached = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.e2el}
        return all((reached[name] or 0.0) * 1000 <= limit for name, limit in self.limits.items())


METRICS = ("ttft", "tpot", "itl", "e2el", "token_gap", "ttft_intended", "e2el_intended")
PERCENTILES = (50, 90, 99)


def samples_ms(records: Iterable[Record]) -> dict[str, NDArray[np.float64]]:
    """Every sample of every metric, in milliseconds, of the requests that ended well."""
    found: dict[str, list[float]] = {name: [] for name in METRICS}
    for record in records:
        if not record.ok or not record.times:
            continue
        first, last = record.times[0], record.times[-1]
        found["ttft"].append(first - record.sent)
        found["e2el"].append(last - record.sent)
        found["ttft_intended"].append(first - record.due)
        found["e2el_intended"].append(last - record.due)
        if record.tpot is not None:
            found["tpot"].append(record.tpot)
        gaps = np.diff(record.times)
        found["itl"].extend(gaps)
        found["token_gap"].extend(np.repeat(gaps / record.counts[1:], record.counts[1:]))
    return {name: np.asarray(values, np.float64) * 1000 for name, values in found.items()}


def figures(records: Sequence[Record], duration: float, goal: Goal) -> dict[str, Any]:
    """The numbers of a run, by the keys that result files of `vllm bench serve` use."""
    good = [record for record in records if record.ok]
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(records) - len(good),
        "errors": count_by(record.code for record in records if not record.ok),
        "total_input_tokens": sum(record.prompt_tokens for record in good),
        "total_output_tokens": sum(record.completion_tokens for record in good),
        "total_cached_tokens": sum(record.cached_tokens for record in good),
        "request_throughput": len(good) / duration,
        "request_goodput": sum(map(goal.met, records)) / duration if goal.limits else None,
        "good_share": sum(map(goal.met, records)) / max(1, len(records)) if goal.limits else None,
    }
    result["output_throughput"] = result["total_output_tokens"] / duration
    result["total_token_throughput"] = (result["total_input_tokens"] + result["total_output_tokens"]) / duration
    result["max_output_tokens_per_s"] = _peak_tokens(good)
    result["max_concurrent_requests"] = int(max(in_flight(records)[1], default=0))
    for name, values in samples_ms(records).items():
        result[f"mean_{name}_ms"] = float(values.mean()) if values.size else None
        result[f"std_{name}_ms"] = float(values.std()) if values.size else None
        for percent in PERCENTILES:
            key = f"{'median' if percent == 50 else f'p{percent}'}_{name}_ms"
            result[key] = float(np.percentile(values, percent)) if values.size else None
    return result


def count_by(names: Iterable[str]) -> dict[str, int]:
    """How often each name occurs."""
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts


def in_flight(records: Sequence[Record]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """(times, requests in flight from that time on)."""
    events = sorted([(record.sent, 1) for record in records] + [(record.ended, -1) for record in records])
    times = np.array([time for time, _ in events])
    return times, np.cumsum([change for _, change in events], dtype=np.int64)


def _peak_tokens(records: Sequence[Record]) -> float:
    """The most tokens that arrived within one whole second of the run."""
    seconds: dict[int, int] = {}
    for record in records:
        for time, count in zip(record.times, record.counts, strict=True):
            seconds[int(time)] = seconds.get(int(time), 0) + count
    return float(max(seconds.values(), default=0))
