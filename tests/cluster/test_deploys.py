"""Deploying: rolling restarts of workers and of two schedulers under load, and TLS between all parts."""

import contextlib
import signal
import time

import grpc
import psutil
import pytest

from bench.chaos import Round, told
from bench.traffic import Crowd, mixed_requests
from client import Lockstep, RetryPolicy
from protos import worker_pb2, worker_pb2_grpc
from protos.worker_link import SECRET_VARIABLE
from scheduler_svc.up import free_port
from tests.cluster import Command
from tests.services.test_security import certificate

pytestmark = pytest.mark.services
REQUESTS = mixed_requests(41, count=8)


def worker(model, address, **flags):
    return Command("lockstep-worker", **{"model": model, "listen": address, "threads": 1} | flags)


def address():
    return f"127.0.0.1:{free_port('127.0.0.1')}"


def asked(client):
    """Rounds of requests for as long as the caller wishes; every answer that is not like the first."""
    first = [told(answer) for answer in Round(client, REQUESTS).join()]
    assert None not in first

    def again():
        return Round(client, REQUESTS), first

    return again


def test_workers_are_restarted_one_by_one_under_load(tiny):
    """SIGTERM to a worker ends its epoch at once and the process with code 0; its replacement takes over."""
    places = [address(), address()]
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(worker(tiny, place, rank=r, tp=2)) for r, place in enumerate(places)]
        scheduler = stack.enter_context(
            Command("lockstep-scheduler", workers=",".join(places), listen=address(), step_timeout=5)
        )
        public = scheduler.output[scheduler.wait_for_line("lockstep-scheduler: serving")].rpartition(" ")[2]
        expected = Crowd(public, REQUESTS).join()
        for rank in (0, 1):
            crowd = Crowd(public, REQUESTS)
            crowd.wait_for_tokens(20)
            begun = len(scheduler.output)
            assert workers[rank].stop(10) == 0
            workers[rank] = stack.enter_context(worker(tiny, places[rank], rank=rank, tp=2))
            scheduler.wait_for_line("serves:", after=begun)
            assert crowd.join() == expected


def test_two_schedulers_are_restarted_one_by_one_behind_a_client_under_load(tiny):
    """Each replica has its worker; the client library goes to the other one and takes its streams along."""
    with contextlib.ExitStack() as stack:
        places, publics, schedulers = [address(), address()], [address(), address()], []
        for place in places:
            stack.enter_context(worker(tiny, place))

        def start(i):
            command = Command("lockstep-scheduler", workers=places[i], listen=publics[i], drain_timeout=0.3)
            return stack.enter_context(command)

        schedulers = [start(0), start(1)]
        for scheduler in schedulers:
            scheduler.wait_for_line("lockstep-scheduler: serving")
        with Lockstep(publics, retry=RetryPolicy(patience_s=30, max_backoff_s=0.3)) as client:
            again = asked(client)
            for i in (0, 1):
                crowd, first = again()
                crowd.wait_for_tokens(20)
                assert schedulers[i].stop(15) == 0
                schedulers[i] = start(i)
                assert [told(answer) for answer in crowd.join()] == first
                schedulers[i].wait_for_line("lockstep-scheduler: serving")


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pki")
    for name, authority in (("ca", None), ("worker", "ca"), ("scheduler", "ca"), ("stranger", None)):
        certificate(folder, name, authority)
    return folder


def test_mutual_tls_between_scheduler_and_workers(tiny, pki):
    place = f"localhost:{free_port('127.0.0.1')}"
    tls = dict(tls_cert=pki / "worker.crt", tls_key=pki / "worker.key", tls_ca=pki / "ca.crt")
    shown = dict(
        worker_tls_cert=pki / "scheduler.crt", worker_tls_key=pki / "scheduler.key", worker_tls_ca=pki / "ca.crt"
    )
    with (
        worker(tiny, place, **tls),
        Command("lockstep-scheduler", workers=place, listen=address(), **shown) as scheduler,
    ):
        public = scheduler.output[scheduler.wait_for_line("lockstep-scheduler: serving")].rpartition(" ")[2]
        assert all(answer.is_whole(max(1, r.sampling.n)) for answer, r in zip(Crowd(public, REQUESTS).join(), REQUESTS))
        for credentials in (
            None,
            grpc.ssl_channel_credentials((pki / "ca.crt").read_bytes()),
            grpc.ssl_channel_credentials(
                (pki / "ca.crt").read_bytes(), (pki / "stranger.key").read_bytes(), (pki / "stranger.crt").read_bytes()
            ),
        ):
            channel = grpc.secure_channel(place, credentials) if credentials else grpc.insecure_channel(place)
            with channel, pytest.raises(grpc.RpcError) as refusal:
                worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=3)
            assert refusal.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def test_a_wrong_secret_is_told_and_serves_nobody(tiny):
    place = address()
    with (
        worker(tiny, place, environment={SECRET_VARIABLE: "one"}),
        Command(
            "lockstep-scheduler", workers=place, listen=address(), environment={SECRET_VARIABLE: "other"}
        ) as scheduler,
    ):
        scheduler.wait_for_line("serves only those who know its secret", 30)
        assert not any("lockstep-scheduler: serving" in line for line in scheduler.output)


@pytest.mark.slow
def test_memory_of_shared_logits_leaves_no_name_behind(tiny):
    """Logits of one host go through memory without a name in any file system, so a crash leaves nothing."""
    before = set(psutil.os.listdir("/dev/shm"))
    with contextlib.ExitStack() as stack:
        place = address()
        stack.enter_context(worker(tiny, place))
        scheduler = stack.enter_context(
            Command("lockstep-scheduler", workers=place, listen=address(), sample_at="scheduler")
        )
        public = scheduler.output[scheduler.wait_for_line("lockstep-scheduler: serving")].rpartition(" ")[2]
        crowd = Crowd(public, REQUESTS)
        crowd.wait_for_tokens(20)
        scheduler.process.send_signal(signal.SIGKILL)
        crowd.join(10)
        time.sleep(0.2)
    assert {name for name in set(psutil.os.listdir("/dev/shm")) - before if "lockstep" in name} == set()
