"""A rank leaves a collective that hangs when it is told to, not when the peer's time is over."""

import threading
import time

import pytest
import torch

from worker_svc.parallel.group import GlooGroup, GroupLost, host_store, join_store

TIMEOUT_S = 4.0


@pytest.fixture
def pair():
    store = host_store("127.0.0.1", TIMEOUT_S)
    groups = [None, None]

    def form(rank):
        own = store if rank == 0 else join_store("127.0.0.1", store.port, TIMEOUT_S)
        groups[rank] = GlooGroup(own, rank, 2, 1, TIMEOUT_S, "127.0.0.1")

    threads = [threading.Thread(target=form, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield groups
    for group in groups:
        group.close()
    for thread in threading.enumerate():
        if thread.name == "gloo-end":
            thread.join(2 * TIMEOUT_S)


def hang(group):
    """Seconds until the collective ended, and with what."""
    ended = []

    def gather():
        started = time.monotonic()
        try:
            group.all_gather(torch.ones(4))
        except GroupLost as lost:
            ended.append((time.monotonic() - started, str(lost)))

    thread = threading.Thread(target=gather)
    thread.start()
    return thread, ended


def test_an_abort_frees_a_rank_whose_peer_says_nothing(pair):
    thread, ended = hang(pair[0])
    time.sleep(0.6)
    pair[0].abort()
    thread.join(10)
    assert ended[0][0] < 0.6 + 1.0 and "aborted" in ended[0][1]
    with pytest.raises(GroupLost):
        pair[0].barrier()


def test_without_an_abort_the_step_timeout_ends_it(pair):
    thread, ended = hang(pair[0])
    thread.join(3 * TIMEOUT_S)
    assert TIMEOUT_S - 0.5 < ended[0][0] < TIMEOUT_S + 2


def test_a_slow_peer_within_the_timeout_is_waited_for(pair):
    """Longer than one slice of waiting."""
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(pair[0].all_gather(torch.zeros(2)))),
        threading.Thread(target=lambda: (time.sleep(1.2), results.append(pair[1].all_gather(torch.ones(2))))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [result.tolist() for result in results] == [[[0, 0], [1, 1]]] * 2
