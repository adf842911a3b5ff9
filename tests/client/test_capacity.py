"""The server that measures the client is exact, and a real gRPC client takes everything that it sends."""

import threading

import grpc
import pytest

from bench import client_capacity
from bench.replay_server import Replay
from client import Lockstep
from client.drive import SPAWN
from client.loadtest import Plan
from protos import generation_pb2 as pb
from protos import generation_pb2_grpc


def test_more_than_every_window_arrives_whole_and_in_order():
    server = Replay()
    with Lockstep(f"127.0.0.1:{server.port}") as client:
        streams = [client.stream([1], max_tokens=9000, request_id=str(n)) for n in range(3)]  # 150 kB each
        threads = [threading.Thread(target=list, args=(stream,)) for stream in streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for stream in streams:
            done = stream.completion
            assert len(done.choices[0].token_ids) == 9000 == done.usage.completion_tokens
            assert done.choices[0].finish.reason == "length"
    assert all(len(times) == 9001 and times == sorted(times) for times in server.log.values()) and len(server.log) == 3


def test_the_schedule_is_kept_and_a_client_that_leaves_leaves_nothing():
    server = Replay()
    server.gap = 0.01
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        message = pb.GenerateRequest(request_id="kept")
        message.sampling.max_tokens = 30
        left = stub.Generate(message)
        next(left)
        left.cancel()
        events = list(stub.Generate(message, timeout=10))
        assert len(events) == 30 and events[-1].usage.completion_tokens == 30
    sent = server.log["kept"]
    assert sent[-1] - sent[1] == pytest.approx(0.29, rel=0.1)


def test_the_measurement_ends_with_its_verdict(capsys):
    pipe, theirs = SPAWN.Pipe()
    server = threading.Thread(target=client_capacity.serve, args=(theirs,), daemon=True)
    server.start()
    plan = Plan(f"127.0.0.1:{pipe.recv()}", concurrency=4, processes=1)
    found = client_capacity.measure(pipe, plan, 4, 0.5, flood_messages=300)
    pipe.send(("end", None))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("capacity=") and "worst_error=" in last
    assert found["capacity_messages_per_s"] > found["offered_messages_per_s"] > 0
    assert set(found["figures"]) == {f"{s}_{n}" for s in ("mean", "median", "p99") for n in ("tpot", "itl", "e2el")}
