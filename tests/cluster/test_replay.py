"""What was recorded can be run again, anywhere, and a recording of other bits is noticed."""

import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.traffic import Crowd, mixed_requests
from protos import codec
from protos.step import GroupConfig, StepBatch, int32s
from scheduler_svc import recording
from scheduler_svc.recording import Answer, RecordedGroup, Recording, read_recording, recorded_files
from scheduler_svc.replay import replay_file, run
from tests.cluster import Cluster
from worker_svc.assembly import load_executor
from worker_svc.config import WorkerConfig
from worker_svc.engine import LocalExecutor

from .scripted import ScriptedRunner, first_step, introduce

pytestmark = pytest.mark.services

HERE = SimpleNamespace(workers=None, model=None, threads=1)


@pytest.fixture(scope="module")
def recorded(tiny, tmp_path_factory):
    """Mixed traffic with preemption, shared prefixes and a small pool, in files of 4 KiB."""
    folder = tmp_path_factory.mktemp("recording")
    flags = dict(kv_blocks=48, max_num_seqs=8, max_batch_tokens=48, pipeline_depth=2)
    with Cluster(tiny, tp=2, record=folder, record_mib=1, **flags) as cluster:
        for seed in (1, 2, 3):
            Crowd(cluster.address, mixed_requests(seed, count=12)).join()
    return folder


def test_a_recording_runs_again_without_a_difference(recorded, tiny, capsys):
    files = recorded_files(recorded)
    assert run(files, HERE) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    replayed = int(last.split()[0].removeprefix("replayed="))
    assert replayed > 150 and "differing=0" in last


def test_the_command_does_the_same(recorded):
    command = [sys.executable, str(Path(sys.executable).parent / "lockstep-replay"), str(recorded_files(recorded)[-1])]
    if not Path(command[1]).exists():
        command[1:2] = ["-m", "scheduler_svc.replay"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "differing=0" in done.stdout, done


def tampered(path, target, offset):
    """A copy in which one byte of the third-last answer is another."""
    data = bytearray(path.read_bytes())
    at, answers = len(recording.MAGIC), []
    while at < len(data):
        kind, length = recording.RECORD.unpack_from(data, at)
        if kind == b"R" and length > recording.ANSWER.size:
            answers.append(at + recording.RECORD.size)
        at += recording.RECORD.size + length
    data[answers[-3] + offset] ^= 1
    target.write_bytes(data)
    return struct.unpack_from("<Q", data, answers[-3])[0]


def test_a_digest_that_differs_is_named_with_its_step(recorded, tmp_path, capsys):
    copy = tmp_path / "tampered.steps"
    seq = tampered(recorded_files(recorded)[-1], copy, offset=8)
    assert run([copy], HERE) == 1
    out = capsys.readouterr().out
    assert f"step {seq} differs" in out and "differing=1" in out


def test_a_torn_end_is_no_error(recorded, tmp_path):
    copy = tmp_path / "torn.steps"
    copy.write_bytes(recorded_files(recorded)[-1].read_bytes()[:-7])
    assert run([copy], HERE) == 0
    (tmp_path / "other.steps").write_bytes(b"something else")
    assert run([tmp_path / "other.steps"], HERE) == 2


def test_a_model_that_computes_otherwise_differs_at_its_first_step(recorded, tiny):
    """The mutant: a replay on a runner whose third token is another one."""
    config = WorkerConfig(tiny)
    executor = load_executor(config)
    runner = executor._runner
    real = runner._draw

    def wrong(plan, logits):
        logits = logits.clone()
        logits[0, 7] = 1e6
        return real(plan, logits)

    runner._draw = wrong
    _, difference = replay_file(executor, recorded_files(recorded)[0], 1)
    executor.close()
    assert difference is not None


def steps(executor, count):
    tokens = []
    batches = [first_step(1, introduce(0, [5, 6, 7], blocks=range(30)))]
    batches += [StepBatch(1, seq) for seq in range(2, count + 1)]
    for batch in batches:
        tokens += executor.step(batch).result(5).token_ids.tolist()
    return tokens


def test_files_are_bounded_and_each_can_be_replayed_alone(tmp_path):
    local = LocalExecutor(ScriptedRunner())
    executor = Recording(local, tmp_path, max_bytes=8 << 12)
    executor.join(GroupConfig(epoch=1, max_num_seqs=2, max_seq_len=1024, num_blocks=64))
    steps(executor, 400)
    for seq in range(401, 2500):
        slots = int32s(0) if (seq - 401) % 400 == 0 else int32s()
        row = (introduce(0, [seq % 50], blocks=range(30)),) if len(slots) else ()
        executor.step(StepBatch(1, seq, retired=slots, rows=row)).result(5)
    executor.close()
    files = recorded_files(tmp_path)
    assert 1 < len(files) <= recording.FILES
    assert sum(path.stat().st_size for path in files) < 12 << 12
    total = 0
    for epoch, path in enumerate(files, 1):
        again = LocalExecutor(ScriptedRunner())
        agreed, difference = replay_file(again, path, epoch)
        again.close()
        assert difference is None
        total += agreed
    assert total > 400


def test_the_format_gives_back_what_went_in(tmp_path):
    executor = Recording(LocalExecutor(ScriptedRunner()), tmp_path)
    executor.join(GroupConfig(epoch=1, max_num_seqs=2, max_seq_len=512, num_blocks=64))
    tokens = steps(executor, 5)
    executor.close()
    group, snapshot, *records = read_recording(recorded_files(tmp_path)[0])
    assert isinstance(group, RecordedGroup) and group.config.num_blocks == 64 and not snapshot.rows
    answers = [record for record in records if isinstance(record, Answer)]
    assert [token for answer in answers for token in answer.token_ids.tolist()] == tokens
    batches = [record for record in records if isinstance(record, StepBatch)]
    assert [batch.seq for batch in batches] == [1, 2, 3, 4, 5]
    assert codec.encode_batch(batches[0]) == codec.encode_batch(
        first_step(1, introduce(0, [5, 6, 7], blocks=range(30)))
    )


def test_a_disk_that_is_gone_stops_the_recording_and_nothing_else(tmp_path, caplog):
    executor = Recording(LocalExecutor(ScriptedRunner()), tmp_path)
    executor._writer._record = lambda *_: (_ for _ in ()).throw(OSError("no space left"))
    executor.join(GroupConfig(epoch=1, max_num_seqs=2, max_seq_len=512, num_blocks=64))
    assert len(steps(executor, 20)) == 20
    executor.close()
    assert "recording stops: no space left" in caplog.text
