"""A span of the application, through the client library and the real services, down to the workers' steps."""

import asyncio
import importlib.util
import subprocess
import sys

import pytest

if importlib.util.find_spec("opentelemetry") is None:
    pytest.skip("the extra otel is not installed", allow_module_level=True)

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import INVALID_SPAN, use_span

from client import AsyncLockstep, Lockstep
from client.traces import trace_metadata
from tests.client.mock_server import MockServer, script
from tests.cluster import Cluster
from tests.services.served import wait_until
from tests.services.test_tracing import Collector, attributes
from tests.tiny_models import make_tiny


@pytest.fixture
def spans():
    """A tracer of the application and what it exported."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider.get_tracer("application"), exporter
    provider.shutdown()


def plain(address):
    with Lockstep(address) as client:
        client.generate([1, 2, 3], max_tokens=6, ignore_eos=True)


def streamed_late(address):
    """The loop runs outside of the span that made the request."""
    with Lockstep(address) as client:
        stream = client.stream([1, 2, 3], max_tokens=6, ignore_eos=True)
        with use_span(INVALID_SPAN):
            list(stream)


def batched(address):
    with Lockstep(address) as client:
        client.batch([[1, 2, 3]], max_tokens=6, ignore_eos=True)


def asynchronous(address):
    async def main():
        async with AsyncLockstep(address) as client:
            await client.generate([1, 2, 3], max_tokens=6, ignore_eos=True)

    asyncio.run(main())


def asynchronous_batch(address):
    async def main():
        async with AsyncLockstep(address) as client:
            await client.batch([[1, 2, 3]], max_tokens=6, ignore_eos=True)

    asyncio.run(main())


WAYS = (plain, streamed_late, batched, asynchronous, asynchronous_batch)


@pytest.mark.services
def test_the_servers_spans_hang_under_the_applications_down_to_the_steps(tmp_path, spans):
    tracer, exporter = spans
    collector = Collector()
    try:
        with Cluster(make_tiny(tmp_path / "tiny"), traces=collector.url, trace_share=0) as cluster:
            plain(cluster.address)  # outside of any span: with a share of 0 it leaves none
            for way in WAYS:
                with tracer.start_as_current_span(way.__name__):
                    way(cluster.address)
            wait_until(lambda: sum(span.name == "lockstep.generate" for span in collector.spans) == len(WAYS))
    finally:
        collector.stop()
    mine = exporter.get_finished_spans()
    assert [span.name for span in mine] == [way.__name__ for way in WAYS]
    for span in mine:
        (root,) = [
            one
            for one in collector.spans
            if one.name == "lockstep.generate" and int.from_bytes(one.trace_id) == span.context.trace_id
        ]
        assert int.from_bytes(root.parent_span_id) == span.context.span_id
        steps = [one for one in collector.spans if one.parent_span_id == root.span_id and one.name == "lockstep.step"]
        assert len(steps) == 6 and all(attributes(step)["lockstep.worker.run_ms"] > 0 for step in steps)
        assert span.start_time <= root.start_time_unix_nano
    assert len({span.trace_id for span in collector.spans}) == len(WAYS)


def test_a_request_that_is_repeated_stays_in_its_trace(spans):
    tracer, _ = spans
    with MockServer() as server, Lockstep(server.address) as client, tracer.start_as_current_span("mine") as span:
        client.generate([1, 2], max_tokens=4, tenant=script(refuse=1), request_id="again")
        sent = server.sent["again"]
    assert len(sent.arrived) == 2
    assert f"{span.get_span_context().trace_id:032x}" in sent.metadata["traceparent"]


def test_without_a_span_nothing_is_sent_and_nothing_imported():
    assert trace_metadata() == ()
    code = (
        "import sys, client; from client.traces import trace_metadata as t; print(t(), 'opentelemetry' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "() False\n"
