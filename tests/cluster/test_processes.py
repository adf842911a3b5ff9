"""Starting, stopping and refusing: what an operator meets before and after the tokens."""

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time

import grpc
import psutil
import pytest

from bench.traffic import Crowd
from protos import generation_pb2 as pb
from protos import worker_pb2, worker_pb2_grpc
from protos.worker_link import SECRET_KEY, SECRET_VARIABLE
from tests.cluster import NOT_SERVING, SERVING, Cluster, Command, health, wait_for_health, wait_until_gone

pytestmark = pytest.mark.services


def request(max_tokens, seed=1):
    message = pb.GenerateRequest()
    message.token_ids.ids.extend([1, 2, 3])
    message.sampling.max_tokens, message.sampling.ignore_eos, message.sampling.seed = max_tokens, True, seed
    return message


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@pytest.fixture(scope="module")
def one(tiny):
    with Cluster(tiny) as cluster:
        yield cluster


def test_any_order_of_starting_converges(tiny):
    port = free_port()
    with Command("lockstep-scheduler", workers=f"127.0.0.1:{port}", listen="127.0.0.1:0") as scheduler:
        line = scheduler.output[scheduler.wait_for_line("listening on")]
        address = line.split("listening on ")[1].split(",")[0]
        address = address if not address.endswith(":0") else f"127.0.0.1:{_port_of(scheduler.pid)}"
        wait_for_health(address, NOT_SERVING, 10)
        time.sleep(1)
        assert health(address) == NOT_SERVING
        with Command("lockstep-worker", model=tiny, listen=f"127.0.0.1:{port}", threads=1):
            scheduler.wait_for_line("lockstep-scheduler: serving")
            wait_for_health(address, SERVING, 5)
            (answer,) = Crowd(address, [request(5)]).join()
            assert answer.is_whole(1)


def _port_of(pid):
    return next(c.laddr.port for c in psutil.Process(pid).net_connections() if c.status == psutil.CONN_LISTEN)


def test_a_snapshot_that_cannot_be_served_is_refused_before_the_port_is_bound(tiny, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with Cluster_that_fails(broken, tp=2) as up:
        code = up.process.wait(60)
        assert code == 2
        assert "model.safetensors" in up.text and "lockstep-worker: rank" not in up.text


class Cluster_that_fails(Command):
    def __init__(self, model, **flags):
        super().__init__("lockstep-up", **{"model": model, "listen": "127.0.0.1:0"} | flags)


def test_a_tp_that_does_not_fit_is_refused_with_those_that_do(tiny):
    with Cluster_that_fails(tiny, tp=3) as up:
        assert up.process.wait(60) == 2
        assert "valid values of tp: 1, 2, 4" in up.text


def test_a_pool_that_no_memory_holds_ends_the_command_and_says_so(tiny):
    with Cluster_that_fails(tiny, kv_blocks=1 << 31) as up:
        assert up.process.wait(60) == 2
        wait_until_gone([psutil.Process(pid) for pid in up.pids()], 5)
    assert "no group can be formed" in up.text and "num_blocks is out of bounds" in up.text
    assert "lockstep-scheduler ended with code 2 while starting" in up.text


def test_a_snapshot_that_can_no_longer_be_served_ends_the_command_and_is_not_tried_for_ever(tiny, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    with Cluster(copy) as cluster:
        (copy / "model.safetensors").write_bytes(b"")
        os.kill(cluster.worker_pid(), signal.SIGKILL)
        assert cluster.process.wait(60) == 2
    assert "lockstep-worker rank 0 ended with code 2 and would again" in cluster.text


@pytest.mark.parametrize("which", ["scheduler", "worker"])
def test_a_taken_port_is_an_error_that_names_it(tiny, which):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if which == "worker":
            command = Command("lockstep-worker", model=tiny, listen=f"127.0.0.1:{port}")
        else:
            command = Command("lockstep-scheduler", workers="127.0.0.1:1", listen=f"127.0.0.1:{port}")
        with command:
            assert command.process.wait(60) == 3
            assert str(port) in command.text


def test_a_worker_listens_on_loopback_alone_and_refuses_strangers(tiny):
    with Cluster(tiny, tp=2) as cluster:
        below = [psutil.Process(pid) for pid in cluster.pids()]
        listening = [c.laddr for p in below for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
        assert {address.ip for address in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, listening
        arguments = psutil.Process(cluster.worker_pid(0)).cmdline()
        worker = arguments[arguments.index("--listen") + 1]
        with grpc.insecure_channel(worker) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            for metadata in ((), ((SECRET_KEY, "guess"),)):
                for call in (
                    lambda m: stub.Describe(worker_pb2.DescribeRequest(), metadata=m),
                    lambda m: stub.Leave(worker_pb2.LeaveRequest(epoch=1), metadata=m),
                    lambda m: list(stub.Steps(iter([worker_pb2.StepRequest()]), metadata=m)),
                ):
                    with pytest.raises(grpc.RpcError) as refusal:
                        call(metadata)
                    assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert health(worker) == SERVING  # which needs no secret
        assert SECRET_VARIABLE not in " ".join(arguments)
        assert Crowd(cluster.address, [request(5)]).join()[0].is_whole(1)


def test_a_worker_beyond_loopback_needs_a_secret(tiny):
    with Command("lockstep-worker", model=tiny, listen="0.0.0.0:0") as worker:
        assert worker.process.wait(60) == 2
        assert SECRET_VARIABLE in worker.text and "--tls-cert" in worker.text
    with Command("lockstep-worker", model=tiny, listen="0.0.0.0:0", environment={SECRET_VARIABLE: "s"}) as worker:
        worker.wait_for_line("listening on")


def test_ranks_that_do_not_fit_together_are_told_apart(tiny):
    port = free_port()
    with (
        Command("lockstep-worker", model=tiny, listen=f"127.0.0.1:{port}", rank=1, tp=2),
        Command("lockstep-scheduler", workers=f"127.0.0.1:{port}", listen="127.0.0.1:0") as scheduler,
    ):
        scheduler.wait_for_line("was started as rank 1 of 2; 1 are listed", 20)


def test_sigterm_lets_running_streams_end(tiny):
    with Cluster(tiny, drain_timeout=20) as cluster:
        crowd = Crowd(cluster.address, [request(300, seed) for seed in range(4)])
        crowd.wait_for_each(5)
        stopped = threading.Thread(target=lambda: codes.append(cluster.stop()))
        codes = []
        stopped.start()
        deadline = time.monotonic() + 5
        while health(cluster.address) == SERVING:
            assert time.monotonic() < deadline
        (late,) = Crowd(cluster.address, [request(5)]).join()
        assert late.error == "UNAVAILABLE"
        assert all(answer.is_whole(1) and answer.num_tokens == 300 for answer in crowd.join())
        stopped.join(20)
        assert codes == [0]


@pytest.mark.slow  # as for the scheduler alone, in tests/services
def test_at_the_end_of_the_drain_time_streams_end_with_a_status(tiny):
    with Cluster(tiny, drain_timeout=0.5) as cluster:
        crowd = Crowd(cluster.address, [request(500, seed) for seed in range(4)])
        crowd.wait_for_each(5)
        assert cluster.stop() == 0
        answers = crowd.join(10)
        assert all(answer.error == "UNAVAILABLE" and answer.num_tokens >= 5 for answer in answers), answers


@pytest.mark.slow  # as for the scheduler alone, in tests/services
def test_a_second_signal_waits_for_nothing(tiny):
    with Cluster(tiny, drain_timeout=60) as cluster:
        crowd = Crowd(cluster.address, [request(500)])
        crowd.wait_for_each(5)
        started = time.monotonic()
        cluster.stop(signals=2)
        assert time.monotonic() - started < 6
        crowd.join(10)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_behind_however_the_supervisor_ends(tiny, number):
    with Cluster(tiny, tp=2) as cluster:
        below = [psutil.Process(pid) for pid in cluster.pids()]
        assert len(below) == 4  # scheduler, engine, two workers
        cluster.process.send_signal(number)
        cluster.process.wait(30)
        assert not wait_until_gone(below, 10)


def test_the_processes_are_easy_to_recognise(one):
    names = {psutil.Process(pid).name() for pid in one.pids()}
    assert names == {"lockstep-schedu", "lockstep-engine", "lockstep-worker"}
    told = subprocess.run(
        ["ps", "-ww", "-o", "args=", "-p", str(one.worker_pid(0))], capture_output=True, text=True
    ).stdout
    assert "lockstep-worker --listen 127.0.0.1:" in told


def test_an_idle_cluster_sleeps(one):
    Crowd(one.address, [request(20)]).join()
    time.sleep(1)
    processes = [psutil.Process(pid) for pid in [one.pid, *one.pids()]]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(3)
    spent = {p.name(): round(sum(p.cpu_times()[:2]) - b, 2) for p, b in zip(processes, before)}
    assert sum(spent.values()) < 0.15, spent


def test_a_scheduler_that_is_killed_comes_back_on_its_port(tiny):
    with Cluster(tiny) as cluster:
        (expected,) = Crowd(cluster.address, [request(20)]).join()
        for name in ("lockstep-scheduler", "lockstep-engine"):
            begun = len(cluster.output)
            os.kill(cluster.pids(name)[0], signal.SIGKILL)
            cluster.wait_for_line("lockstep-scheduler: serving", after=begun)
            assert Crowd(cluster.address, [request(20)]).join() == [expected]


def test_prompts_are_not_logged(one):
    secret = "a sentence nobody else must read"
    message = pb.GenerateRequest(text=secret)
    message.sampling.max_tokens = 3
    assert Crowd(one.address, [message]).join()[0].is_whole(1)
    assert secret not in one.text and json.dumps(list(secret.encode()))[1:20] not in one.text
