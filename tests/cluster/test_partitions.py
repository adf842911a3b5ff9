"""Partitions between hosts: each rank in a network namespace of its own, links that go down without a word.

Needs root and iproute2 (`ip`), which .ci/run installs where it is missing.
"""

import os
import shutil
import subprocess
import time

import pytest

from bench.traffic import Crowd, mixed_requests
from protos.worker_link import SECRET_VARIABLE
from tests.cluster import NOT_SERVING, SERVING, Command, wait_for_health

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"),
]
REQUESTS = mixed_requests(31, count=6)
SECRET = {SECRET_VARIABLE: "between hosts"}
STEP_TIMEOUT_S = 3


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Network:
    """One namespace a rank, a cable from each to this host and one between them; no bridge, whose traffic a host's
    firewall may drop. This host is 10.N.M.1, rank r is 10.N.M.(r + 2).
    """

    def __init__(self):
        self.tag = f"ls{os.getpid() % 100000}"
        self.base = f"10.{70 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self.names = [f"{self.tag}n{rank}" for rank in range(2)]

    def address(self, rank):
        return f"{self.base}.{rank + 2}"

    def __enter__(self):
        try:
            for rank, name in enumerate(self.names):
                outside = f"{self.tag}v{rank}"
                ip("netns", "add", name)
                ip("link", "add", outside, "type", "veth", "peer", "name", "up0", "netns", name)
                ip("addr", "add", f"{self.base}.1/32", "dev", outside)
                ip("link", "set", outside, "up")
                ip("route", "add", self.address(rank), "dev", outside, "src", f"{self.base}.1")
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", "up0", "up")
                ip("-n", name, "addr", "add", f"{self.address(rank)}/32", "dev", "lo")
                ip("-n", name, "route", "add", f"{self.base}.1", "dev", "up0", "src", self.address(rank))
            one, other = self.names
            ip("-n", one, "link", "add", "peer0", "type", "veth", "peer", "name", "peer0", "netns", other)
            for rank, name in enumerate(self.names):
                ip("-n", name, "link", "set", "peer0", "up")
                self._route_to_peer(rank)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in self.names:  # their cables go with them
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def _route_to_peer(self, rank):
        route = (self.address(1 - rank), "dev", "peer0", "src", self.address(rank))
        ip("-n", self.names[rank], "route", "replace", *route)

    def isolate(self, rank):
        """Nothing reaches the rank and nothing leaves it; its processes live on."""
        ip("-n", self.names[rank], "link", "set", "up0", "down")
        ip("-n", self.names[rank], "link", "set", "peer0", "down")

    def part(self):
        """The ranks no longer reach each other; both still reach the scheduler."""
        ip("-n", self.names[0], "link", "set", "peer0", "down")

    def heal(self):
        for rank, name in enumerate(self.names):
            ip("-n", name, "link", "set", "up0", "up")
            ip("-n", name, "link", "set", "peer0", "up")
            ip("-n", name, "route", "replace", f"{self.base}.1", "dev", "up0", "src", self.address(rank))
        for rank in range(2):
            self._route_to_peer(rank)


@pytest.fixture(scope="module")
def group(tiny):
    """(network, public address, the three commands)"""
    with Network() as network:
        commands = []
        try:
            for rank, name in enumerate(network.names):
                flags = dict(model=tiny, listen=f"{network.address(rank)}:5100", rank=rank, tp=2, threads=1)
                inside = ("ip", "netns", "exec", name)
                commands.append(Command("lockstep-worker", prefix=inside, environment=SECRET, **flags).__enter__())
            workers = ",".join(f"{network.address(rank)}:5100" for rank in range(2))
            scheduler = Command(
                "lockstep-scheduler",
                workers=workers,
                listen="127.0.0.1:0",
                step_timeout=STEP_TIMEOUT_S,
                environment=SECRET,
            ).__enter__()
            commands.append(scheduler)
            line = scheduler.output[scheduler.wait_for_line("lockstep-scheduler: serving")]
            yield network, line.rpartition(" ")[2], scheduler
        finally:
            for command in reversed(commands):
                command.stop()


@pytest.fixture(scope="module")
def undisturbed(group):
    answers = Crowd(group[1], REQUESTS).join()
    assert all(answer.is_whole(max(1, request.sampling.n)) for answer, request in zip(answers, REQUESTS))
    return answers


def serves_again(group, undisturbed, crowd, begun):
    _, address, scheduler = group
    scheduler.wait_for_line("serves:", after=begun)
    assert crowd.join() == undisturbed
    wait_for_health(address, SERVING, 5)


@pytest.mark.parametrize("rank", [0, 1])
def test_streams_outlive_a_host_that_is_cut_off(group, undisturbed, rank):
    network, address, scheduler = group
    begun = len(scheduler.output)
    crowd = Crowd(address, REQUESTS)
    assert crowd.wait_for_tokens(20)
    started = time.monotonic()
    network.isolate(rank)
    try:
        wait_for_health(address, NOT_SERVING, STEP_TIMEOUT_S + 2)
        time.sleep(max(0.0, 6 - (time.monotonic() - started)))
    finally:
        network.heal()
    serves_again(group, undisturbed, crowd, begun)


def test_streams_outlive_a_partition_that_only_the_ranks_feel(group, undisturbed):
    network, address, scheduler = group
    begun = len(scheduler.output)
    crowd = Crowd(address, REQUESTS)
    assert crowd.wait_for_tokens(20)
    network.part()
    try:
        lost = scheduler.wait_for_line("is lost", 2 * STEP_TIMEOUT_S + 2, after=begun)
        assert "step" in scheduler.output[lost]
        wait_for_health(address, NOT_SERVING, 2)
        time.sleep(1)
    finally:
        network.heal()
    serves_again(group, undisturbed, crowd, begun)


def test_a_host_that_is_cut_off_while_idle_is_missed(group, undisturbed):
    network, address, scheduler = group
    begun = len(scheduler.output)
    network.isolate(1)
    try:
        wait_for_health(address, NOT_SERVING, 5)
    finally:
        network.heal()
    serves_again(group, undisturbed, Crowd(address, REQUESTS), begun)


def test_strangers_on_the_network_are_refused(group):
    import grpc

    from protos import worker_pb2, worker_pb2_grpc

    with grpc.insecure_channel(f"{group[0].address(0)}:5100") as channel:
        with pytest.raises(grpc.RpcError) as refusal:
            worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=5)
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
