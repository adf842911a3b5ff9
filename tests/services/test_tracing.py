"""Traces reach a collector: from the caller's span to the workers' steps, and nothing of what was said."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tests.services.pseudo import Pseudo
from tests.services.served import Served, request, wait_until

if importlib.util.find_spec("opentelemetry") is None:
    pytest.skip("the extra otel is not installed", allow_module_level=True)

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319d-b7ad6b7169203331-00"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector that keeps what it gets."""

    def __init__(self):
        self.spans = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, message, context):
        for resource in message.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def stop(self):
        self._server.stop(0).wait()


def attributes(span):
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def test_spans_of_a_request_hang_under_the_callers(tmp_path):
    collector = Collector()
    try:
        with Served(tmp_path, Pseudo(step_s=0.002), dict(traces=collector.url)) as served:
            message = request([7, 7, 7], max_tokens=40, ignore_eos=True, request_id="traced")
            list(served.stub.Generate(message, metadata=[("traceparent", PARENT)]))
            list(served.stub.Generate(request(max_tokens=2), metadata=[("traceparent", UNSAMPLED)]))
            with pytest.raises(grpc.RpcError):
                list(served.stub.Generate(request(max_tokens=60, ignore_eos=True, timeout_ms=20, request_id="late")))
        wait_until(lambda: sum(span.name == "lockstep.generate" for span in collector.spans) == 2)
    finally:
        collector.stop()
    mine = [span for span in collector.spans if span.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"]
    (root,) = [span for span in mine if span.name == "lockstep.generate"]
    assert root.parent_span_id.hex() == "b7ad6b7169203331"
    children = [span.name for span in mine if span.parent_span_id == root.span_id]
    assert {name: children.count(name) for name in set(children)} == {
        "lockstep.queue": 1,
        "lockstep.prefill": 1,
        "lockstep.decode": 1,
        "lockstep.step": 32,
    }
    steps = [span for span in mine if span.name == "lockstep.step"]
    assert all(root.start_time_unix_nano <= s.start_time_unix_nano <= s.end_time_unix_nano for s in steps)
    assert attributes(steps[0])["lockstep.worker.run_ms"] == 1.0
    told = attributes(root)
    assert (told["gen_ai.request.id"], told["gen_ai.usage.completion_tokens"]) == ("traced", 40)
    assert not any(span.trace_id.hex().endswith("319d") for span in collector.spans)
    (late,) = [s for s in collector.spans if attributes(s).get("gen_ai.request.id") == "late"]
    assert late.status.message == "DEADLINE_EXCEEDED" and not late.parent_span_id


def test_without_traces_no_request_is_traced(tmp_path):
    with Served(tmp_path) as served:
        list(served.stub.Generate(request(max_tokens=2), metadata=[("traceparent", PARENT)]))
        assert not any(stream.traced for stream, _ in served.server._front._live.values())
