"""OpenTelemetry traces of requests, an optional extra: from the caller's span to the steps of the workers.

    lockstep.generate                        the caller's traceparent is its parent
      lockstep.queue, lockstep.prefill, lockstep.decode
      lockstep.step  (the first of them)     when it was sent, how long the workers ran

Only requests that are traced cost anything: those whose caller's span is sampled, and a share of the others. Attributes
are counts and ids in the conventions of gen_ai.*; no prompt and no answer.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from google.rpc import code_pb2
from google.rpc.status_pb2 import Status
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from scheduler_svc.messages import EngineState, Stepped
from scheduler_svc.observer import Observer
from scheduler_svc.streams import Stream

MAX_STEPS = 32  # spans of one request's steps


class Traces:
    """An Observer of the front end in front of another one, which hears everything too.

    Args:
        exporter: where spans go; `otlp` makes the usual one.
        share: of the requests that come without a sampled parent.
    """

    def __init__(self, inner: Observer, exporter: SpanExporter, share: float = 1.0) -> None:
        self._inner = inner
        resource = Resource.create({"service.name": "lockstep-scheduler"})
        self._provider = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(share)))
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        self._tracer = self._provider.get_tracer("lockstep")
        self._propagator = TraceContextTextMapPropagator()
        self._spans: dict[int, tuple[trace.Span, list[int]]] = {}  # by key; steps told so far
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def close(self) -> None:
        """Send what is still here."""
        self._provider.shutdown()

    def admitted(self, stream: Stream) -> None:
        self._inner.admitted(stream)
        request = stream.request
        parent = self._propagator.extract({"traceparent": stream.trace_parent} if stream.trace_parent else {})
        span = self._tracer.start_span(
            "lockstep.generate", parent, trace.SpanKind.SERVER, start_time=self._ns(request.arrival)
        )
        if not span.is_recording():
            return
        span.set_attributes(
            {
                "gen_ai.request.id": request.request_id,
                "gen_ai.request.max_tokens": request.max_tokens,
                "gen_ai.request.n": request.n,
                "gen_ai.request.temperature": request.sampling.temperature,
                "gen_ai.request.top_p": request.sampling.top_p,
            }
        )
        stream.traced = True
        self._spans[request.key] = (span, [0])

    def stepped(self, stream: Stream, stepped: Stepped) -> None:
        """A traced request got a token from this step."""
        entry = self._spans.get(stream.request.key)
        if entry is None or entry[1][0] >= MAX_STEPS:
            return
        entry[1][0] += 1
        attributes = {
            "lockstep.epoch": stepped.epoch,
            "lockstep.seq": stepped.seq,
            "lockstep.worker.run_ms": stepped.run_ms,
            "lockstep.worker.wait_ms": stepped.wait_ms,
        }
        self._child(entry[0], "lockstep.step", stepped.sent, stepped.done, attributes)

    def ended(self, stream: Stream, now: float) -> None:
        self._inner.ended(stream, now)
        entry = self._spans.pop(stream.request.key, None)
        if entry is None:
            return
        span, _ = entry
        request, usage = stream.request, stream.usage()
        admitted = request.arrival + stream.first_admission_s
        self._child(span, "lockstep.queue", request.arrival, admitted)
        if stream.first_token_at is not None:
            self._child(span, "lockstep.prefill", admitted, stream.first_token_at)
            self._child(span, "lockstep.decode", stream.first_token_at, now)
            span.set_attribute("gen_ai.latency.time_to_first_token", stream.first_token_at - request.arrival)
        span.set_attributes(
            {
                "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
                "gen_ai.usage.completion_tokens": usage.completion_tokens,
                "gen_ai.latency.time_in_queue": stream.first_admission_s,
                "gen_ai.latency.e2e": now - request.arrival,
                "gen_ai.response.finish_reasons": [
                    choice.reason.value if choice.reason is not None else "none" for choice in stream.choices
                ],
            }
        )
        if stream.failure is not None:
            span.set_status(trace.StatusCode.ERROR, code_pb2.Code.Name(stream.failure.code))
        span.end(self._ns(now))

    def refused(self, status: Status) -> None:
        self._inner.refused(status)

    def refused_late(self, stream: Stream, status: Status) -> None:
        self._inner.refused_late(stream, status)
        entry = self._spans.pop(stream.request.key, None)
        if entry is not None:
            entry[0].set_status(trace.StatusCode.ERROR, code_pb2.Code.Name(status.code))
            entry[0].end()

    def tokens(self, count: int, first_token_s: Sequence[float], gaps_s: Sequence[float]) -> None:
        self._inner.tokens(count, first_token_s, gaps_s)

    def state(self, state: EngineState, reason: str) -> None:
        self._inner.state(state, reason)

    def stats(self, values: Mapping[str, float]) -> None:
        self._inner.stats(values)

    def _child(
        self, parent: trace.Span, name: str, start: float, end: float, attributes: dict[str, Any] | None = None
    ) -> None:
        context = trace.set_span_in_context(parent)
        child = self._tracer.start_span(name, context, attributes=attributes, start_time=self._ns(start))
        child.end(self._ns(end))

    def _ns(self, monotonic_s: float) -> int:
        return self._epoch_ns + int(monotonic_s * 1e9)


def otlp(endpoint: str) -> SpanExporter:
    """Spans over OTLP and gRPC to a collector; http:// is plaintext."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
