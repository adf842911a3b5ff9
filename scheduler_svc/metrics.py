"""Counters, gauges and histograms of the scheduler, in the concepts that dashboards for such servers show.

The front end's half is counted here; the engine's half arrives as StatsReports whose names are used as they are, so a
new figure there needs no line here. Everything is written on one thread; the endpoint reads snapshots.
"""

import bisect
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from wsgiref.simple_server import WSGIServer

from google.rpc import code_pb2
from google.rpc.status_pb2 import Status
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler_svc.logs import log_request
from scheduler_svc.messages import EngineState, Stepped
from scheduler_svc.streams import Stream

PREFIX = "lockstep_"
TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
GAP_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4),
    *(0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_BOUNDS = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
COUNT_BOUNDS = tuple(float(1 << power) for power in range(18))

HELP = {
    "requests_running": "Choices that hold a slot.",
    "requests_waiting": "Choices that wait for one.",
    "requests_waiting_by_reason": "Waiting choices by what they wait for.",
    "kv_cache_usage_ratio": "Share of the KV blocks that live choices hold.",
    "prefix_cache_queries_total": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits_total": "Prompt tokens found there and not computed.",
    "preemptions_total": "Choices that gave their blocks back and were computed again.",
    "recoveries_total": "Groups of workers that were lost and formed again.",
    "engine_epoch": "The epoch of the group that serves.",
    "digests_agreed_total": "Steps whose digests agreed on every rank.",
    "digest_mismatches_total": "Epochs that ended because ranks drew different tokens.",
    "step_seconds_total": "Time of all steps by phase; the phases overlap when steps are pipelined.",
    "time_to_first_token_seconds": "From the arrival of a request to its first token.",
    "inter_token_latency_seconds": "Between two tokens of one choice.",
    "e2e_request_latency_seconds": "From the arrival of a request to its end.",
    "request_queue_time_seconds": "From the arrival of a request to its first admission.",
    "request_prefill_time_seconds": "From first admission to first token.",
    "request_time_per_output_token_seconds": "(last token - first token) / (tokens - 1) of a request.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Output tokens of a request, over all choices.",
    "prompt_tokens_total": "Prompt tokens of ended requests.",
    "generation_tokens_total": "Tokens delivered.",
    "requests_finished_total": "Choices by how they ended.",
    "requests_refused_total": "Requests that were not admitted, by gRPC code.",
    "requests_failed_total": "Admitted requests that ended with an error, by gRPC code.",
    "requests_live": "Requests between admission and end.",
    "state": "1 for the state the scheduler is in.",
}
LABELLED = re.compile(r'^(\w+)\{(\w+)="([^"]*)"\}$')


class Histogram:
    """Counts by upper bound; only the sum and the buckets are kept."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as the exposition format wants them."""
        found, running = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts):
            running += count
            found.append((bound, float(running)))
        return found


class Metrics:
    """An Observer of the front end that counts, and logs one line for each request."""

    def __init__(self, model_name: str = "") -> None:
        self.model_name = model_name
        self._started = time.time()
        self._engine: Mapping[str, float] = {}
        self._state = EngineState.STARTING
        self._mismatches = 0
        self._live = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._finished: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._histograms = {
            "time_to_first_token_seconds": Histogram(TTFT_BOUNDS),
            "inter_token_latency_seconds": Histogram(GAP_BOUNDS),
            "e2e_request_latency_seconds": Histogram(LATENCY_BOUNDS),
            "request_queue_time_seconds": Histogram(LATENCY_BOUNDS),
            "request_prefill_time_seconds": Histogram(LATENCY_BOUNDS),
            "request_time_per_output_token_seconds": Histogram(GAP_BOUNDS),
            "request_prompt_tokens": Histogram(COUNT_BOUNDS),
            "request_generation_tokens": Histogram(COUNT_BOUNDS),
        }

    # Observer

    def admitted(self, stream: Stream) -> None:
        self._live += 1

    def refused(self, status: Status) -> None:
        self._refused[code_pb2.Code.Name(status.code)] += 1

    def refused_late(self, stream: Stream, status: Status) -> None:
        self._live -= 1
        self.refused(status)

    def tokens(self, count: int, first_token_s: Sequence[float], gaps_s: Sequence[float]) -> None:
        self._generation_tokens += count
        for value in first_token_s:
            self._histograms["time_to_first_token_seconds"].add(value)
        gaps = self._histograms["inter_token_latency_seconds"]
        for value in gaps_s:
            gaps.add(value)

    def ended(self, stream: Stream, now: float) -> None:
        self._live -= 1
        request, usage = stream.request, stream.usage()
        histograms = self._histograms
        self._prompt_tokens += usage.prompt_tokens
        histograms["request_prompt_tokens"].add(usage.prompt_tokens)
        histograms["request_generation_tokens"].add(usage.completion_tokens)
        histograms["e2e_request_latency_seconds"].add(now - request.arrival)
        histograms["request_queue_time_seconds"].add(stream.first_admission_s)
        if stream.first_token_at is not None:
            prefill_s = stream.first_token_at - request.arrival - stream.first_admission_s
            histograms["request_prefill_time_seconds"].add(max(0.0, prefill_s))
            last = max(choice.last_token_at for choice in stream.choices)
            most = max(choice.text.num_tokens for choice in stream.choices)
            if most > 1:
                per_token = (last - stream.first_token_at) / (most - 1)
                histograms["request_time_per_output_token_seconds"].add(per_token)
        for choice in stream.choices:
            self._finished[choice.reason.value if choice.reason is not None else "cancelled"] += 1
        if stream.failure is not None:
            self._failed[code_pb2.Code.Name(stream.failure.code)] += 1
        log_request(stream, usage, now)

    def stepped(self, stream: Stream, stepped: Stepped) -> None:
        pass

    def state(self, state: EngineState, reason: str) -> None:
        self._state = state
        if state is EngineState.RECOVERING and "disagree" in reason:
            self._mismatches += 1

    def stats(self, values: Mapping[str, float]) -> None:
        self._engine = values

    # Readers

    def values(self) -> dict[str, float]:
        """Everything as one flat map: the Stats call."""
        own: dict[str, float] = {
            "requests_live": self._live,
            "prompt_tokens_total": self._prompt_tokens,
            "generation_tokens_total": self._generation_tokens,
            "digest_mismatches_total": self._mismatches,
            "process_start_time_seconds": self._started,
        }
        for name, label, counter in (
            ("requests_finished_total", "reason", self._finished),
            ("requests_refused_total", "code", self._refused),
            ("requests_failed_total", "code", self._failed),
        ):
            own |= {f'{name}{{{label}="{value}"}}': count for value, count in sorted(counter.items())}
        own |= {f'state{{state="{state.value}"}}': float(state is self._state) for state in EngineState}
        return own | dict(self._engine)

    def histograms(self) -> Mapping[str, Histogram]:
        return self._histograms

    def summary(self) -> dict[str, float]:
        """`values` and the count and sum of every histogram."""
        found = self.values()
        for name, histogram in self._histograms.items():
            found[f"{name}_count"] = sum(histogram.counts)
            found[f"{name}_sum"] = histogram.total
        return found


class _Collector(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        model = self._metrics.model_name
        for key, value in self._metrics.values().items():
            match = LABELLED.match(key)
            name, label, text = match.groups() if match is not None else (key, "", "")
            if name not in families:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                labels = ["model_name", label] if label else ["model_name"]
                families[name] = kind(PREFIX + name, HELP.get(name, name.replace("_", " ")), labels=labels)
            families[name].add_metric([model, text] if label else [model], value)  # type: ignore[attr-defined]
        yield from families.values()
        for name, histogram in self._metrics.histograms().items():
            family = HistogramMetricFamily(PREFIX + name, HELP[name], labels=["model_name"])
            family.add_metric([model], histogram.buckets(), histogram.total)
            yield family


def serve_metrics(metrics: Metrics, host: str, port: int) -> tuple[WSGIServer, threading.Thread]:
    """The Prometheus endpoint, on threads of its own. Raises OSError when the port is taken."""
    registry = CollectorRegistry()
    registry.register(_Collector(metrics))
    return start_http_server(port, host, registry)
