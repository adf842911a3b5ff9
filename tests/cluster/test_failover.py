"""Workers are disposable: whatever happens to one, open streams continue with the same bits."""

import os
import signal
import time

import pytest

from bench.traffic import Crowd, mixed_requests
from protos import generation_pb2 as pb
from tests.cluster import NOT_SERVING, SERVING, Cluster, Command, health, wait_for_health
from tests.cluster.poisoned import POISON, make_poisoned

pytestmark = pytest.mark.services

REQUESTS = mixed_requests(11, count=8)
WITHIN_S = 5.0


@pytest.fixture(scope="module")
def cluster(tiny):
    with Cluster(tiny, tp=2, step_timeout=3, max_batch_tokens=64, max_num_seqs=16) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(cluster):
    answers = Crowd(cluster.address, REQUESTS).join()
    assert all(answer.is_whole(max(1, request.sampling.n)) for answer, request in zip(answers, REQUESTS))
    return answers


def long_request(seed, max_tokens=120):
    request = pb.GenerateRequest()
    request.token_ids.ids.extend(range(seed, seed + 30))
    request.sampling.max_tokens, request.sampling.ignore_eos = max_tokens, True
    request.sampling.seed, request.sampling.logprobs = seed, 2
    return request


@pytest.mark.parametrize("rank, number", [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_streams_outlive_a_worker(cluster, undisturbed, rank, number):
    begun = len(cluster.output)
    crowd = Crowd(cluster.address, REQUESTS)
    assert crowd.wait_for_tokens(30)
    os.kill(cluster.worker_pid(rank), number)
    assert wait_for_health(cluster.address, NOT_SERVING, 5) < 5
    cluster.wait_for_line("listening on", after=begun)
    listening = time.monotonic()
    cluster.wait_for_line("serves:", after=begun)
    recovered_s = time.monotonic() - listening
    assert crowd.join() == undisturbed
    assert health(cluster.address) == SERVING
    assert recovered_s < WITHIN_S, f"{recovered_s:.1f} s from listening to serving"


def test_a_worker_that_dies_while_idle_is_missed_and_replaced(cluster, undisturbed):
    begun = len(cluster.output)
    os.kill(cluster.worker_pid(1), signal.SIGKILL)
    wait_for_health(cluster.address, NOT_SERVING, 5)
    crowd = Crowd(cluster.address, REQUESTS)  # waits in the queue
    cluster.wait_for_line("serves:", after=begun)
    assert crowd.join() == undisturbed


def test_a_worker_that_dies_during_prefill_is_survived(cluster):
    prompts = []
    for seed in range(3):
        request = long_request(seed, max_tokens=8)
        request.token_ids.ids.extend(range(1, 300))
        prompts.append(request)
    expected = Crowd(cluster.address, prompts).join()
    for request in prompts:
        request.cache_salt = "prefill it again"
    crowd = Crowd(cluster.address, prompts)
    time.sleep(0.1)
    os.kill(cluster.worker_pid(0), signal.SIGKILL)
    assert crowd.join() == expected


def test_past_the_recovery_timeout_streams_end_and_the_group_may_still_come_back(tiny):
    worker_flags = {"model": tiny, "threads": 1}
    with Command("lockstep-worker", listen="127.0.0.1:0", **worker_flags) as worker:
        address = worker.output[worker.wait_for_line("listening on")].rpartition(" ")[2]
        with Command(
            "lockstep-scheduler", workers=address, listen="127.0.0.1:0", recovery_timeout=1.5, step_timeout=2
        ) as scheduler:
            line = scheduler.output[scheduler.wait_for_line("lockstep-scheduler: serving")]
            public = line.rpartition(" ")[2]
            expected = Crowd(public, [long_request(1)]).join()
            crowd = Crowd(public, [long_request(1, 400), long_request(2, 400)])
            crowd.wait_for_each(5)
            worker.process.kill()
            answers = crowd.join(20)
            assert [answer.error for answer in answers] == ["UNAVAILABLE"] * 2
            assert all(5 <= answer.num_tokens < 400 for answer in answers)
            assert health(public) == NOT_SERVING
            with Command("lockstep-worker", listen=address, **worker_flags):
                wait_for_health(public, SERVING, 30)
                assert Crowd(public, [long_request(1)]).join() == expected


def test_a_nan_row_fails_its_request_and_touches_nobody_else(tmp_path):
    model = make_poisoned(tmp_path / "poisoned")
    with Cluster(model, tp=1, max_num_seqs=8, kv_blocks=24) as cluster:
        expected = Crowd(cluster.address, [long_request(1), long_request(2)]).join()
        bad = [long_request(3 + i) for i in range(3)]
        for request in bad:
            request.token_ids.ids[10] = POISON
        answers = Crowd(cluster.address, [long_request(1), bad[0], long_request(2), bad[1], bad[2]]).join()
        assert [answer.error for answer in answers] == ["", "INTERNAL", "", "INTERNAL", "INTERNAL"]
        assert [answers[0], answers[2]] == expected
        # their blocks, keys and values of NaN included, go to the next ones
        for _ in range(3):
            assert Crowd(cluster.address, [long_request(1), long_request(2)]).join() == expected
