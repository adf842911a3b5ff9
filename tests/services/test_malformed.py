"""Bytes that are no message: INVALID_ARGUMENT at every method of both services, no traceback, nothing left behind."""

import logging
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from protos import generation_pb2 as pb
from protos import worker_pb2 as inner
from protos.malformed import Malformed, checked, tolerant
from protos.step import GroupConfig
from protos.worker_link import EPOCH_KEY
from scheduler_svc.remote import RemoteExecutor
from tests.cluster.scripted import first_step, introduce, wait_until, workers
from tests.services.pseudo import Pseudo
from tests.services.served import Served, request, tokens
from worker_svc.malformed import RefuseMalformed

NONSENSE = b"\xff\xff\xff"
METHODS = [
    (f"/{service.full_name}/{method.name}", method)
    for service in (
        pb.DESCRIPTOR.services_by_name["Generation"],
        health_pb2.DESCRIPTOR.services_by_name["Health"],
        reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
    )
    for method in service.methods
]
WORKER_METHODS = [
    (f"/lockstep.v1.Worker/{method.name}", method) for method in inner.DESCRIPTOR.services_by_name["Worker"].methods
]


def call(channel, path, method, messages, metadata=()):
    """The error of a call with these bytes, by whatever kind of call the method is."""
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    invoke = getattr(channel, kind)(path, request_serializer=None, response_deserializer=None)
    given = iter(messages) if method.client_streaming else messages[0]
    with pytest.raises(grpc.RpcError) as error:
        reply = invoke(given, timeout=10, metadata=metadata)
        if method.server_streaming:
            list(reply)
    return error.value


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Served(tmp_path_factory.mktemp("tokenizer"), Pseudo(step_s=0.002)) as served:
        yield served


@pytest.mark.parametrize("path, method", METHODS, ids=[path for path, _ in METHODS])
def test_every_public_method_refuses_nonsense(served, caplog, path, method):
    with caplog.at_level(logging.DEBUG):
        error = call(served.channel, path, method, [NONSENSE])
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert method.input_type.full_name in error.details() and "3 bytes" in error.details()
    assert "Traceback" not in caplog.text and not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_nonsense_in_the_middle_ends_the_stream_and_frees_its_requests(served):
    begun = threading.Event()

    def messages():
        for name in ("one", "two"):
            message = request([5, 6], max_tokens=60, ignore_eos=True, request_id=name)
            yield pb.ClientMessage(request=message).SerializeToString()
        begun.wait(10)
        yield NONSENSE
        threading.Event().wait(5)  # not half-closed: the server must not wait for that

    many = served.channel.stream_stream(
        "/lockstep.v1.Generation/GenerateMany",
        request_serializer=None,
        response_deserializer=pb.GenerateEvents.FromString,
    )
    served.model.hold()
    served.model.allow(3)
    arrived = []
    try:
        with pytest.raises(grpc.RpcError) as error:
            for message in many(messages(), timeout=10):
                arrived += message.events
                if len({event.request_id for event in arrived}) == 2:
                    begun.set()
    finally:
        served.model.go()
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "ClientMessage" in error.value.details()
    assert {event.request_id for event in arrived} == {"one", "two"}
    served.wait_idle()
    assert len(tokens(served.generate(max_tokens=5, ignore_eos=True, request_id="one"))) == 5  # the id is free again


def test_nonsense_as_the_only_message_of_a_stream(served):
    path, method = next(one for one in METHODS if one[0].endswith("GenerateMany"))
    assert call(served.channel, path, method, [NONSENSE, NONSENSE]).code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("path, method", WORKER_METHODS, ids=[path for path, _ in WORKER_METHODS])
def test_every_method_of_a_worker_refuses_nonsense(caplog, path, method):
    with workers(1, interceptors=[RefuseMalformed()]) as group, grpc.insecure_channel(group[0].address) as channel:
        metadata = ()
        if method.name == "Steps":
            stub = channel.unary_unary("/lockstep.v1.Worker/Join", inner.JoinRequest.SerializeToString)
            stub(
                inner.JoinRequest(
                    epoch=4,
                    tp=1,
                    block_size=16,
                    max_num_seqs=4,
                    max_batch_tokens=16,
                    max_seq_len=64,
                    pipeline_depth=1,
                    step_timeout_ms=2000,
                )
            )
            metadata = ((EPOCH_KEY, "4"),)
        with caplog.at_level(logging.DEBUG):
            error = call(channel, path, method, [NONSENSE], metadata)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert method.input_type.full_name in error.details()
        assert "Traceback" not in caplog.text and not [r for r in caplog.records if r.levelno >= logging.ERROR]
        wait_until(lambda: group[0].engine.describe().epoch == 0)  # a stream that ends takes its epoch with it
        executor = RemoteExecutor([group[0].address], ready_timeout_s=5)
        executor.join(GroupConfig(epoch=9, max_num_seqs=4, max_seq_len=256, step_timeout_s=2.0))
        assert executor.step(first_step(9, introduce(0, [1]))).result(5).token_ids.size == 1
        executor.close()


def test_a_deserializer_that_fails_is_what_this_is_about():
    """The mutant: without the marker gRPC gets an exception."""
    read = tolerant(pb.GenerateRequest.FromString)
    assert read(pb.GenerateRequest(text="x").SerializeToString()).text == "x"
    with pytest.raises(Malformed, match=r"not a lockstep.v1.GenerateRequest"):
        checked(read(NONSENSE))
    with pytest.raises(Exception, match="Error parsing"):
        pb.GenerateRequest.FromString(NONSENSE)
    assert tolerant(lambda data: data)(NONSENSE) == NONSENSE
