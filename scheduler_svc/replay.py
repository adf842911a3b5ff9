"""`lockstep-replay DIR`: run recorded steps again and say where they first differ.

A recording (scheduler_svc/recording.py) becomes a bug report that anyone with the same model can run: on a worker group
or in this process, at any number of ranks, since bits do not depend on it. What a file does not hold (keys and values
of rows that were live when it began, or found in a cache) is computed first, in steps of our own between the recorded
ones; the digest of a recorded step is compared as if they were not there.

The last line is `replayed=N differing=D files=F`; the exit code is 0 only if D is 0 and N is not.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from protos.step import NO_INTS, Int32s, Row, StepBatch, StepResult, int32s, step_digest
from protos.worker_link import SECRET_VARIABLE
from scheduler_svc.executor import EpochLost, Executor
from scheduler_svc.recording import Answer, RecordedGroup, read_recording, recorded_files


@dataclass(frozen=True, slots=True)
class Difference:
    epoch: int
    seq: int
    recorded: int
    found: int
    rows: tuple[str, ...]  # what each row that differs drew then and now


class Replay:
    """One file, step by step, on an executor that has joined nothing."""

    def __init__(self, executor: Executor, group: RecordedGroup, epoch: int) -> None:
        self._executor = executor
        self._recorded = group.config
        self._epoch = epoch
        self._seq = 0
        self._live: dict[int, str] = {}  # slot -> name
        self._written: set[int] = set()  # blocks whose contents this replay has computed
        self._blocks: dict[int, Int32s] = {}
        config = replace(group.config, epoch=epoch, pipeline_depth=1)
        blocks = executor.join(config)
        if blocks < config.num_blocks:
            raise EpochLost(f"{blocks} blocks where the recording had {config.num_blocks}")

    def begin(self, snapshot: StepBatch) -> None:
        """Rows that were live when the file began."""
        self._introduce(snapshot.retired, snapshot.rows, whole=True)

    def run(self, batch: StepBatch, answer: Answer) -> Difference | None:
        """One recorded step."""
        cached = [row for row in batch.rows if row.num_computed and not self._holds(row)]
        if cached:
            self._introduce(batch.retired, batch.rows, whole=False)
            batch = replace(batch, retired=NO_INTS, rows=())
        else:
            self._note(batch.retired, batch.rows)
        for slot, blocks in _by_slot(batch):
            self._blocks[slot] = np.concatenate([self._blocks[slot], blocks])
        result = self._step(batch)
        for blocks in self._blocks.values():
            self._written.update(blocks.tolist())
        digest = step_digest(self._recorded.epoch, answer.seq, result.token_ids, result.logprobs, result.failed_slots)
        if digest == answer.digest:
            return None
        return Difference(self._recorded.epoch, answer.seq, answer.digest, digest, self._told(result, answer))

    def _told(self, result: StepResult, answer: Answer) -> tuple[str, ...]:
        if len(result.token_ids) != len(answer.token_ids):
            return (f"{len(answer.token_ids)} tokens drawn then, {len(result.token_ids)} now",)
        pairs = enumerate(zip(answer.token_ids.tolist(), result.token_ids.tolist()))
        told = [f"sampling row {i}: token {then} then, {now} now" for i, (then, now) in pairs if then != now]
        return tuple(told) or ("the same tokens with other logprobs",)

    def _holds(self, row: Row) -> bool:
        """Whether this replay has itself computed what the row counts on."""
        needed = -(-row.num_computed // self._recorded.block_size)
        return set(row.block_ids[:needed].tolist()) <= self._written

    def _note(self, retired: Int32s, rows: Iterable[Row]) -> None:
        for slot in retired.tolist():
            del self._live[slot], self._blocks[slot]
        for row in rows:
            self._live[row.slot], self._blocks[row.slot] = row.name, row.block_ids

    def _introduce(self, retired: Int32s, rows: Sequence[Row], whole: bool) -> None:
        """Introduce rows and bring each to the computed count that it had, `whole` from nothing."""
        self._note(retired, rows)
        due = {row.slot: row.num_computed for row in rows if whole or not self._holds(row)}
        fresh = tuple(replace(row, num_computed=0, num_cached=0) if row.slot in due else row for row in rows)
        first = StepBatch(0, 0, retired=retired, rows=fresh)
        while first.rows or len(first.retired) or any(due.values()):
            # One row at a time: rows that share a block write it one after the other, each while no other reads it.
            new = {slot: min(count, self._recorded.max_batch_tokens) for slot, count in due.items() if count}
            new = dict(list(new.items())[:1])
            for slot, count in new.items():
                due[slot] -= count
            held = [slot for slot in self._live if slot not in new]
            self._step(replace(first, slots=int32s(*new), num_new=int32s(*new.values()), held=int32s(*held)))
            first = StepBatch(0, 0)

    def _step(self, batch: StepBatch) -> StepResult:
        self._seq += 1
        return self._executor.step(replace(batch, epoch=self._epoch, seq=self._seq)).result()


def _by_slot(batch: StepBatch) -> Iterable[tuple[int, Int32s]]:
    ends = np.cumsum(batch.extended_counts)
    for slot, count, end in zip(batch.extended_slots.tolist(), batch.extended_counts.tolist(), ends.tolist()):
        yield slot, batch.extended_blocks[end - count : end]


def replay_file(executor: Executor, path: Path, epoch: int) -> tuple[int, Difference | None]:
    """How many recorded steps agreed, and the first that did not. Raises ValueError, EpochLost."""
    records = read_recording(path)
    group, snapshot = next(records), next(records)
    assert isinstance(group, RecordedGroup) and isinstance(snapshot, StepBatch)
    replay = Replay(executor, group, epoch)
    replay.begin(snapshot)
    sent: list[StepBatch] = []
    agreed = 0
    for record in records:
        if isinstance(record, StepBatch):
            sent.append(record)
        elif isinstance(record, Answer):
            difference = replay.run(sent.pop(0), record)
            if difference is not None:
                return agreed, difference
            agreed += 1
    return agreed, None


def _executor(options: argparse.Namespace, group: RecordedGroup) -> Executor:
    executor: Executor
    if options.workers:
        from scheduler_svc.remote import RemoteExecutor

        executor = RemoteExecutor(options.workers.split(","), secret=os.environ.get(SECRET_VARIABLE))
    else:
        from worker_svc.assembly import load_executor
        from worker_svc.config import WorkerConfig

        parts = group.fingerprint
        executor = load_executor(
            WorkerConfig(
                model=options.model or Path(group.model_path),
                dtype=parts.get("dtype"),
                numerics="fast" if parts.get("numerics", "").startswith("fast") else "invariant",
                threads=options.threads,
            )
        )
    if group.config.sample_at_scheduler:
        from scheduler_svc.host_sampling import HostSampling

        executor = HostSampling(executor)
    return executor


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="lockstep-replay", description="Run recorded steps again and compare.")
    parser.add_argument("folder", type=Path, help="what --record wrote, or one file of it")
    parser.add_argument("--workers", metavar="HOST:PORT,...", help="a group to run on; default: in this process")
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: the folder that the recording names")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    options = parser.parse_args(arguments)
    files = [options.folder] if options.folder.is_file() else recorded_files(options.folder)
    if not files:
        parser.error(f"{options.folder} holds no recording")
    from worker_svc import launch

    launch.fix_reductions("invariant", options.threads)
    raise SystemExit(run(files, options))


def run(files: Sequence[Path], options: argparse.Namespace) -> int:
    executor: Executor | None = None
    replayed = differing = 0
    for path in files:
        try:
            group = next(read_recording(path))
            assert isinstance(group, RecordedGroup)
            executor = executor or _executor(options, group)
            facts = executor.describe()
            other = [k for k, v in group.fingerprint.items() if facts.fingerprint.get(k) != v]
            for name in other:
                print(f"{path.name}: {name} was {group.fingerprint[name]!r}, here {facts.fingerprint.get(name)!r}")
            agreed, difference = replay_file(executor, path, facts.epoch + 1)
        except (ValueError, EpochLost) as error:
            print(f"lockstep-replay: {path.name}: {error}", file=sys.stderr)
            return 2
        replayed += agreed + (difference is not None)
        if difference is not None:
            differing += 1
            print(
                f"{path.name}: epoch {difference.epoch} step {difference.seq} differs: digest "
                f"{difference.recorded:016x} recorded, {difference.found:016x} now"
            )
            for row in difference.rows:
                print(f"  {row}")
    if executor is not None:
        executor.close()
    print(f"replayed={replayed} differing={differing} files={len(files)}")
    return 0 if replayed and not differing else 1


if __name__ == "__main__":
    main()
