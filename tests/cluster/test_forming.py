"""Forming a group: what lasts is told from what passes, deaths are noticed, and devices get the time that they need."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from protos.step import CannotForm, EpochLost, GroupConfig
from scheduler_svc import forming, remote
from scheduler_svc.engine_config import EngineConfig
from scheduler_svc.forming import Formed, GroupFormer, NotFormed
from scheduler_svc.remote import RemoteExecutor
from worker_svc.join_failures import JoinFailure, failure_of
from worker_svc.parallel.group import GroupLost

from .scripted import expected_tokens, first_step, introduce, wait_until, workers

CONFIG = GroupConfig(epoch=1, max_num_seqs=4, max_seq_len=256, step_timeout_s=2.0)


def fails(error, times=1):
    """A runner's `on_join` that raises so often."""
    left = [times]

    def on_join(_config):
        if left[0]:
            left[0] -= 1
            raise error

    return {"on_join": on_join}


@pytest.fixture
def connect():
    made = []

    def make(group, **options):
        made.append(RemoteExecutor([worker.address for worker in group], **{"ready_timeout_s": 5} | options))
        return made[-1]

    yield make
    for executor in made:
        executor.close()


LASTING = {
    "a device's memory": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"), "RESOURCE_EXHAUSTED"),
    "the host's memory": (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "RESOURCE_EXHAUSTED"),
    "python's memory": (MemoryError(), "RESOURCE_EXHAUSTED"),
    "sizes": (ValueError("block size 48 divides nothing"), "INVALID_ARGUMENT"),
    "this code": (KeyError("k_proj"), "INTERNAL"),
}


@pytest.mark.parametrize("tp, rank", [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("error, code", LASTING.values(), ids=LASTING)
def test_what_lasts_is_said_to_last_whichever_rank_it_hits(connect, tp, rank, error, code):
    with workers(tp, **{f"rank{rank}": fails(error)}) as group:
        executor = connect(group)
        with pytest.raises(CannotForm, match=code) as refusal:
            executor.join(CONFIG)
        assert f"rank {rank}" in str(refusal.value) and (str(error)[:20] in str(refusal.value) or not str(error))
        executor.join(replace(CONFIG, epoch=2))  # and what does not last after all is no obstacle
        assert executor.step(first_step(2, introduce(0, [5]))).result(5).token_ids.tolist() == expected_tokens(
            1, 0, [5], 1
        )


@pytest.mark.parametrize("error", [GroupLost("a peer is gone"), RuntimeError("connection reset"), OSError("no route")])
def test_what_peers_do_passes(connect, error):
    with workers(2, rank1=fails(error)) as group:
        with pytest.raises(EpochLost) as lost:
            connect(group).join(CONFIG)
        assert not isinstance(lost.value, CannotForm)


def test_sizes_that_no_model_has_last(connect):
    with workers(1) as group:
        with pytest.raises(CannotForm, match="max_seq_len is out of bounds"):
            connect(group).join(replace(CONFIG, max_seq_len=5000))


def test_a_broken_device_asks_for_another_process(connect):
    broken = []
    with workers(
        1, rank0=fails(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    ) as group:
        group[0].service._on_broken = broken.append
        with pytest.raises(EpochLost) as lost:
            connect(group).join(CONFIG)
        assert not isinstance(lost.value, CannotForm) and "illegal memory access" in broken[0]
    assert failure_of(torch.AcceleratorError("CUDA error: out of memory"), 2) is JoinFailure.LASTING


@pytest.mark.parametrize("dying", [0, 2])
def test_a_rank_that_dies_while_others_form_is_noticed_at_once(connect, dying):
    inside, gate = threading.Event(), threading.Event()

    def wait(_config):
        inside.set()
        gate.wait(20)

    slow = {f"rank{rank}": {"on_join": wait} for rank in range(3)}
    with workers(3, **slow) as group:
        executor = connect(group, form_timeout_s=60)

        def die():
            inside.wait(10)
            group[dying].server.stop(0)

        threading.Thread(target=die).start()
        started = time.monotonic()
        with pytest.raises(EpochLost, match=f"rank {dying} .*UNAVAILABLE|rank {dying} .*CANCELLED"):
            executor.join(replace(CONFIG, step_timeout_s=30))
        assert time.monotonic() - started < 5
        gate.set()


@pytest.mark.parametrize("device, limit", [("cpu", 0.5), ("cuda:0", 20.0)])
def test_the_time_to_form_is_what_the_device_needs(connect, monkeypatch, device, limit):
    monkeypatch.setattr(remote, "FORM_TIMEOUT_S", 0.5)
    monkeypatch.setattr(remote, "CUDA_FORM_TIMEOUT_S", 20.0)
    with workers(2, rank1={"on_join": lambda config: config.epoch == 1 and time.sleep(1.5)}) as group:
        for worker in group:
            facts = replace(worker.runner.describe(), device=device)
            worker.runner.describe = lambda facts=facts: facts
        executor = connect(group)
        if limit < 1.5:
            with pytest.raises(EpochLost):
                executor.join(CONFIG)
            wait_until(lambda: group[1].engine.describe().epoch == 0)
            connect(group, form_timeout_s=20).join(replace(CONFIG, epoch=2))
        else:
            executor.join(CONFIG)


class _Refusing:
    """An executor whose group cannot form, so often."""

    def __init__(self, describe, times):
        self.describe, self._left, self.joins = describe, times, 0

    def join(self, config):
        self.joins += 1
        if self.joins <= self._left:
            raise CannotForm("rank 1: out of memory")
        return 64


@pytest.mark.parametrize("times, forms", [(2, True), (9, False)])
def test_a_group_that_cannot_form_is_given_up_and_not_asked_for_ever(monkeypatch, times, forms):
    monkeypatch.setattr(forming, "CANNOT_FORM_PAUSE_S", 0.05)
    told, over = [], threading.Event()
    with workers(1) as group:
        executor = _Refusing(group[0].runner.describe, times)

        def tell(news):
            told.append(news)
            if isinstance(news, Formed) or news.fatal:
                over.set()

        former = GroupFormer(EngineConfig(), executor, tell, lambda: False)
        former.start(0, None)
        assert over.wait(5)
        time.sleep(0.3)
        former.close()
    assert executor.joins == 3
    assert isinstance(told[-1], Formed) is forms
    if not forms:
        assert told[-1] == NotFormed("no group can be formed: rank 1: out of memory", fatal=True)
