"""A group of workers over gRPC behaves as one engine, and whatever goes wrong ends its epoch once and in time."""

import logging
import threading
import time
from dataclasses import replace

import grpc
import numpy as np
import pytest

from protos import codec, worker_pb2_grpc
from protos import worker_pb2 as pb
from protos.step import EpochLost, GroupConfig, RowSampling, StepBatch, int32s
from protos.worker_link import EPOCH_KEY, LogitsReader, LogitsSegment
from scheduler_svc.remote import RemoteExecutor, _Epoch
from worker_svc.engine import LocalExecutor
from worker_svc.service import WorkerService

from .scripted import ScriptedRunner, expected_tokens, first_step, introduce, wait_until, workers

CONFIG = GroupConfig(epoch=1, max_num_seqs=4, max_seq_len=256, step_timeout_s=2.0)


@pytest.fixture
def remote():
    made = []

    def make(group, **options):
        made.append(RemoteExecutor([worker.address for worker in group], **{"ready_timeout_s": 5} | options))
        return made[-1]

    yield make
    for executor in made:
        executor.close()


def run(executor, prompt, count, epoch=1, depth=1):
    """`count` tokens of one row, with `depth` steps in flight."""
    batches = [first_step(epoch, introduce(0, prompt))] + [StepBatch(epoch, seq) for seq in range(2, count + 1)]
    tokens, flying = [], []
    for batch in batches:
        flying.append(executor.step(batch))
        if len(flying) == depth:
            tokens += flying.pop(0).result(10).token_ids.tolist()
    return tokens + [token for future in flying for token in future.result(10).token_ids.tolist()]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_services_and_one_process_draw_the_same(remote, tp, depth):
    with workers(tp) as group:
        executor = remote(group)
        assert executor.describe().tp == tp
        assert executor.join(CONFIG) > 0
        assert run(executor, [3, 4, 5], 20, depth=depth) == expected_tokens(1, 0, [3, 4, 5], 20)
    local = LocalExecutor(ScriptedRunner())
    local.join(CONFIG)
    assert run(local, [3, 4, 5], 20, depth=depth) == expected_tokens(1, 0, [3, 4, 5], 20)
    local.close()


def test_the_pool_is_what_fits_on_the_smallest_rank(remote):
    with workers(2) as group:
        roomy = group[0].runner.describe
        group[0].runner.describe = lambda: replace(roomy(), memory_bytes=16 * 64 * 40)
        assert remote(group).join(CONFIG) == 40
        assert [worker.runner.joined[-1].num_blocks for worker in group] == [40, 40]


@pytest.mark.parametrize("way", ["pieces", "shared memory"])
def test_logits_come_whole(remote, monkeypatch, way):
    monkeypatch.setattr("protos.codec.LOGITS_PIECE_BYTES", 100)
    monkeypatch.setattr("worker_svc.service.SHARED_FROM_BYTES", 0 if way == "shared memory" else 1 << 60)
    ways = []
    monkeypatch.setattr(
        "scheduler_svc.remote._Epoch._bytes_of",
        lambda epoch, piece, real=_Epoch._bytes_of: ways.append(bool(piece.shared_memory)) or real(epoch, piece),
    )
    with workers(2) as group:
        executor = remote(group)
        executor.join(CONFIG)
        rows = [introduce(slot, [slot + 1], sampling=RowSampling(return_logits=slot != 1)) for slot in range(3)]
        result = executor.step(first_step(1, *rows)).result(5)
        assert result.logits.shape == (2, 97)
        assert result.logits.argmax(-1).tolist() == result.token_ids[[0, 2]].tolist()
        for seq in (2, 3, 4, 5):  # regions of the segment are used in turns
            result = executor.step(StepBatch(1, seq)).result(5)
            assert result.logits.argmax(-1).tolist() == result.token_ids[[0, 2]].tolist()
        assert set(ways) == {way == "shared memory"} and len(ways) == (5 if way == "shared memory" else 40)


def test_a_second_epoch_starts_empty(remote):
    with workers(2) as group:
        executor = remote(group)
        for epoch in (1, 2, 7):
            executor.join(replace(CONFIG, epoch=epoch))
            assert run(executor, [9], 5, epoch) == expected_tokens(1, 0, [9], 5)
        assert executor.describe().epoch == 7  # from which a scheduler that starts anew learns where to go on


def test_a_rank_that_draws_otherwise_ends_the_epoch_and_the_log_names_the_step(remote, caplog):
    def lie(result):
        return replace(result, token_ids=result.token_ids + 1) if result.seq == 3 else result

    lost = []
    with workers(2, rank1={"change": lie}) as group:
        executor = remote(group, on_lost=lost.append)
        executor.join(CONFIG)
        executor.step(first_step(1, introduce(0, [1]))).result(5)
        executor.step(StepBatch(1, 2)).result(5)
        with caplog.at_level(logging.ERROR), pytest.raises(EpochLost, match="step 3: the ranks disagree"):
            executor.step(StepBatch(1, 3)).result(5)
        assert "step 3" in caplog.text and "rank 1" in caplog.text
        assert len(lost) == 1
        with pytest.raises(EpochLost):
            executor.step(StepBatch(1, 4)).result(5)
        executor.join(replace(CONFIG, epoch=2))  # nothing hangs on either rank
        assert run(executor, [9], 2, 2) == expected_tokens(1, 0, [9], 2)


def test_without_the_comparison_the_lie_would_pass(remote, monkeypatch):
    """The mutant of the test above: a scheduler that believes rank 0 alone does not notice."""
    monkeypatch.setattr("scheduler_svc.remote.set", lambda values: {next(iter(values))}, raising=False)
    with workers(2, rank1={"change": lambda result: replace(result, token_ids=result.token_ids + 1)}) as group:
        executor = remote(group)
        executor.join(CONFIG)
        assert executor.step(first_step(1, introduce(0, [1]))).result(5).token_ids.tolist() == expected_tokens(
            1, 0, [1], 1
        )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_is_caught_by_the_step_deadline(remote, rank):
    gate = threading.Event()
    with workers(2, **{f"rank{rank}": {"before": lambda batch: batch.seq == 2 and gate.wait(30)}}) as group:
        executor = remote(group)
        executor.join(replace(CONFIG, step_timeout_s=0.8))
        executor.step(first_step(1, introduce(0, [1]))).result(5)
        started = time.monotonic()
        with pytest.raises(EpochLost):
            executor.step(StepBatch(1, 2)).result(10)
        assert time.monotonic() - started < 2.0
        gate.set()
        executor.join(replace(CONFIG, epoch=2))
        assert run(executor, [9], 2, 2) == expected_tokens(1, 0, [9], 2)


def test_a_slow_step_within_the_deadline_is_no_failure(remote):
    with workers(2, rank1={"before": lambda batch: time.sleep(0.5)}) as group:
        executor = remote(group)
        executor.join(replace(CONFIG, step_timeout_s=0.9))
        assert run(executor, [1], 4, depth=4) == expected_tokens(1, 0, [1], 4)


def test_a_dead_rank_is_noticed_while_idle(remote):
    lost = []
    with workers(2) as group:
        executor = remote(group, on_lost=lost.append)
        executor.join(CONFIG)
        group[1].server.stop(0)
        wait_until(lambda: lost, 5)
        assert "rank 1" in str(lost[0])
        with pytest.raises(EpochLost):
            executor.join(replace(CONFIG, epoch=2))


def test_an_error_in_a_rank_names_the_step_and_frees_the_other_rank(remote):
    def fail(batch):
        if batch.seq == 2:
            raise RuntimeError("no memory")

    with workers(2, rank1={"before": fail}) as group:
        executor = remote(group)
        executor.join(CONFIG)
        executor.step(first_step(1, introduce(0, [1]))).result(5)
        futures = [executor.step(StepBatch(1, seq)) for seq in (2, 3)]
        for future in futures:
            with pytest.raises(EpochLost):
                future.result(5)
        executor.join(replace(CONFIG, epoch=2))


def test_a_batch_that_contradicts_the_table_ends_the_epoch(remote):
    with workers(1) as group:
        executor = remote(group)
        executor.join(CONFIG)
        with pytest.raises(EpochLost, match="not all live"):
            executor.step(StepBatch(1, 1, retired=int32s(3))).result(5)


def test_a_worker_serves_one_stream_of_the_joined_epoch(remote):
    with workers(1) as group:
        executor = remote(group)
        executor.join(replace(CONFIG, epoch=5))
        with grpc.insecure_channel(group[0].address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            for epoch, message in (("5", "has its stream already"), ("4", "not joined"), ("", "unnamed")):
                with pytest.raises(grpc.RpcError, match=message) as refusal:
                    next(stub.Steps(iter([pb.StepRequest()]), metadata=((EPOCH_KEY, epoch),)))
                assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            for epoch, rank, tp, message in (
                (4, 0, 1, "stale"),
                (5, 0, 1, "stale"),
                (6, 1, 2, "rank 0 of 1"),
                (1 << 60, 0, 1, "beyond what can follow"),
            ):
                with pytest.raises(grpc.RpcError, match=message):
                    stub.Join(codec.encode_join(replace(CONFIG, epoch=epoch), rank, tp, ""))
            for sizes in (
                dict(block_size=0),
                dict(max_num_seqs=1 << 30),
                dict(max_seq_len=5000),
                dict(num_blocks=(1 << 32) - 1),
            ):
                with pytest.raises(grpc.RpcError, match=f"{next(iter(sizes))} is out of bounds"):
                    stub.Join(codec.encode_join(replace(CONFIG, epoch=6, **sizes), 0, 1, ""))
        executor.step(first_step(5, introduce(0, [1]))).result(5)  # none of which disturbed it


def test_a_scheduler_that_goes_away_leaves_no_epoch_behind(remote):
    with workers(2) as group:
        executor = remote(group)
        executor.join(CONFIG)
        executor.step(first_step(1, introduce(0, [1]))).result(5)
        executor.close()
        for worker in group:
            wait_until(lambda worker=worker: worker.engine.describe().epoch == 0)


def test_describe_waits_for_a_worker_that_loads_and_gives_up_in_time(remote):
    with workers(1) as group:
        engine = group[0].service._executor
        group[0].service._executor = None
        with pytest.raises(EpochLost, match="loading"):
            remote(group, ready_timeout_s=0.5).describe()
        threading.Timer(0.5, lambda: group[0].service.ready(engine)).start()
        assert remote(group, ready_timeout_s=10).describe().model == "scripted"
    with pytest.raises(EpochLost, match="not ready within"):
        RemoteExecutor(["no-such-host.invalid:1"], ready_timeout_s=0.5).describe()


def test_ranks_of_another_model_or_place_are_refused(remote):
    with workers(2) as group:
        facts = group[1].runner.describe()
        group[1].runner.describe = lambda: replace(facts, fingerprint={"numerics": "other"})
        with pytest.raises(EpochLost, match="numerics"):
            remote(group).join(CONFIG)
        group[1].runner.describe = lambda: facts
        with pytest.raises(EpochLost, match="started as rank"):
            remote(group[::-1]).join(CONFIG)


def test_joins_that_wait_for_a_step_to_end_leave_one_epoch(remote):
    gate, others = threading.Event(), set(threading.enumerate())  # ranks of other tests may hang for a while
    with workers(1, rank0={"before": lambda batch: batch.epoch == 1 and gate.wait(30)}) as group:
        executor = remote(group)
        executor.join(replace(CONFIG, step_timeout_s=0.5))
        with pytest.raises(EpochLost):
            executor.step(first_step(1, introduce(0, [1]))).result(5)
        joins = []
        with grpc.insecure_channel(group[0].address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            for epoch in (2, 3, 4):
                config = replace(CONFIG, epoch=epoch, step_timeout_s=5)
                joins.append(stub.Join.future(codec.encode_join(config, 0, 1, "")))
                time.sleep(0.1)
            gate.set()
            for join in joins:
                join.exception(10)
        assert len([join for join in joins if join.exception() is None]) <= 1
        executor.join(replace(CONFIG, epoch=9))
        assert run(executor, [9], 3, 9) == expected_tokens(1, 0, [9], 3)
        assert group[0].engine.describe().epoch == 9
        own = lambda: {t.name for t in set(threading.enumerate()) - others if t.name.startswith("launch-")}  # noqa: E731
        wait_until(lambda: own() == {"launch-9"})


@pytest.mark.parametrize("rank", [0, 1])
def test_an_answer_out_of_order_ends_the_epoch(remote, rank):
    change = {"change": lambda result: replace(result, seq=5 - result.seq) if result.seq in (2, 3) else result}
    with workers(2, **{f"rank{rank}": change}) as group:
        executor = remote(group)
        executor.join(CONFIG)
        first = executor.step(first_step(1, introduce(0, [1])))
        assert first.result(5).token_ids.tolist() == expected_tokens(1, 0, [1], 1)
        for future in [executor.step(StepBatch(1, seq)) for seq in (2, 3)]:
            with pytest.raises(EpochLost, match="where step 2 is due"):
                future.result(5)


def test_an_answer_that_nobody_asked_for_ends_the_epoch(remote, monkeypatch):
    real = WorkerService._replies
    monkeypatch.setattr(WorkerService, "_replies", lambda *args: [*real(*args), *real(*args)])
    with workers(1) as group:
        executor = remote(group)
        executor.join(CONFIG)
        executor.step(first_step(1, introduce(0, [1]))).exception(5)
        with pytest.raises(EpochLost, match=r"nobody asked for|is due"):
            executor.step(StepBatch(1, 2)).result(5)


def test_shared_memory_of_others_is_never_opened():
    reader = LogitsReader()
    for name in ("/etc/passwd", "/proc/self/environ", "/proc/1/fd/../environ", "/proc/1/fd/x", ""):
        with pytest.raises(ValueError, match="no shared memory of a worker"):
            reader.read(name, 0, 1)
    segment = LogitsSegment(4096, 2)
    offset = segment.write(np.arange(4, dtype=np.float32))
    assert np.frombuffer(reader.read(segment.name, offset, 16), np.float32).tolist() == [0, 1, 2, 3]
    for offset, size in ((8192, 1), (0, 8193), (-1, 4)):
        with pytest.raises(ValueError):
            reader.read(segment.name, offset, size)
    segment.close()
