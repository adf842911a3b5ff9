"""The step stream as files: `Recording` writes it beside any executor, `read_recording` gives it back.

Knows batches, digests and drawn tokens; no text and no logits. A file starts with what a group was joined with and the
rows that were live, so that each file can be replayed alone and old ones may be deleted: the folder never grows past
its bound. Writing is a thread's business and never holds a step up; when it cannot keep up, it stops and says so.

    file    MAGIC, then records: kind (1 byte), length (uint32), payload
    H       JSON: model, fingerprint, GroupConfig; once, first
    S       a StepBatch whose rows were live when the file was begun (num_computed as it was then)
    B       a StepBatch as it was sent
    R       its answer: seq (uint64), digest (uint64), drawn tokens (int32 each)
"""

import json
import logging
import struct
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import IO

import numpy as np

from protos import codec
from protos import worker_pb2 as pb
from protos.step import GroupConfig, Int32s, StepBatch, StepResult
from scheduler_svc.executor import Executor, ExecutorOver
from worker_svc.slots import Contradiction, SlotTable

logger = logging.getLogger(__name__)

MAGIC = b"lockstep-steps-1\n"
SUFFIX = ".steps"
MAX_BYTES = 256 << 20  # of the folder
FILES = 8  # that share it
MAX_WAITING = 4096  # events that the disk has not taken
RECORD = struct.Struct("<cI")
ANSWER = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Answer:
    seq: int
    digest: int
    token_ids: Int32s


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """How a file begins. `config.num_blocks` is the pool that the group had."""

    model: str
    model_path: str
    fingerprint: dict[str, str]
    config: GroupConfig


@dataclass(frozen=True, slots=True)
class _Begin:
    group: RecordedGroup


class Recording(ExecutorOver):
    """An Executor over another one that leaves a recording in `folder`."""

    def __init__(self, executor: Executor, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(executor)
        self._events: Queue[_Begin | StepBatch | StepResult | None] = Queue(MAX_WAITING)
        self._writer = _Writer(folder, max_bytes)
        self._gave_up = False
        self._thread = Thread(target=self._write, name="recording", daemon=True)
        self._thread.start()

    def join(self, config: GroupConfig) -> int:
        facts = self._executor.describe()
        num_blocks = self._executor.join(config)
        joined = replace(config, num_blocks=num_blocks)
        self._put(_Begin(RecordedGroup(facts.model, facts.model_path, dict(facts.fingerprint), joined)))
        return num_blocks

    def step(self, batch: StepBatch) -> Future[StepResult]:
        self._put(batch)
        future = self._executor.step(batch)
        future.add_done_callback(self._answered)
        return future

    def close(self) -> None:
        super().close()
        self._put(None)
        self._thread.join(5)

    def _answered(self, future: Future[StepResult]) -> None:
        if future.exception() is None:
            self._put(replace(future.result(), logits=None))

    def _put(self, event: _Begin | StepBatch | StepResult | None) -> None:
        if self._gave_up:
            return
        try:
            self._events.put_nowait(event)
        except Full:
            self._give_up(f"{MAX_WAITING} events wait for the disk")

    def _give_up(self, reason: str) -> None:
        logger.error("recording stops: %s", reason)
        self._gave_up = True

    def _write(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                self._writer.take(event)
        except (OSError, Contradiction) as error:
            self._give_up(str(error))
        finally:
            self._writer.close()


class _Writer:
    """Files of one folder. Follows the slots as a worker does, to know what is live when a file begins."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._max_file_bytes = max(1 << 12, max_bytes // FILES)
        self._file: IO[bytes] | None = None
        self._written = 0

    def take(self, event: _Begin | StepBatch | StepResult) -> None:
        if isinstance(event, _Begin):
            config = event.group.config
            self._group = event.group
            self._table = SlotTable(config.max_num_seqs, -(-config.max_seq_len // config.block_size))
            self._sent: deque[StepBatch] = deque()
            self._begin_file(1)
        elif isinstance(event, StepBatch):
            self._sent.append(event)
            self._record(b"B", _packed(event))
        elif event.epoch == self._group.config.epoch and self._sent and self._sent[0].seq == event.seq:
            self._record(b"R", ANSWER.pack(event.seq, event.digest) + event.token_ids.astype("<i4").tobytes())
            self._follow(self._sent.popleft(), event)
            if self._written > self._max_file_bytes:
                self._begin_file(event.seq + 1)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _follow(self, batch: StepBatch, result: StepResult) -> None:
        plan = self._table.apply(batch)
        if not self._group.config.sample_at_scheduler:
            self._table.drawn(plan, np.maximum(result.token_ids, 0))

    def _begin_file(self, seq: int) -> None:
        self.close()
        self._delete_old_files()
        config = self._group.config
        self._file = (self._folder / f"{config.epoch:010d}-{seq:012d}{SUFFIX}").open("wb")
        self._file.write(MAGIC)
        self._written = len(MAGIC)
        self._record(b"H", json.dumps({**asdict(self._group), "config": asdict(config)}).encode())
        self._record(b"S", _packed(StepBatch(config.epoch, seq - 1, rows=self._table.introductions())))
        for batch in self._sent:  # in flight: their answers will be in this file
            self._record(b"B", _packed(batch))

    def _delete_old_files(self) -> None:
        files = sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
        for path in files[: max(0, len(files) - FILES + 1)]:
            path.unlink()

    def _record(self, kind: bytes, payload: bytes) -> None:
        assert self._file is not None
        self._file.write(RECORD.pack(kind, len(payload)) + payload)
        self._file.flush()  # to the page cache: what was recorded outlives this process
        self._written += RECORD.size + len(payload)


def _packed(batch: StepBatch) -> bytes:
    data: bytes = codec.encode_batch(batch).SerializeToString()
    return data


def recorded_files(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def read_recording(path: Path) -> Iterator[RecordedGroup | StepBatch | Answer]:
    """The group, the live rows as a batch, then batches and answers as they came; stops at a torn end.

    Raises ValueError for a file that is no recording.
    """
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{path} is no recording of steps")
        while len(head := file.read(RECORD.size)) == RECORD.size:
            kind, length = RECORD.unpack(head)
            payload = file.read(length)
            if len(payload) < length:
                return
            if kind == b"H":
                header = json.loads(payload)
                yield RecordedGroup(**{**header, "config": GroupConfig(**header["config"])})
            elif kind in (b"S", b"B"):
                yield codec.decode_batch(pb.StepBatch.FromString(payload))
            elif kind == b"R":
                seq, digest = ANSWER.unpack_from(payload)
                yield Answer(seq, digest, np.frombuffer(payload, "<i4", offset=ANSWER.size))
            else:
                raise ValueError(f"{path}: a record of unknown kind {kind!r}")
