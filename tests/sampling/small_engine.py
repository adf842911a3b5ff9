"""Core, runners and ranks of a tiny model in one process, each rank a thread: the engine without its wires.

Made so that a test can break a part of it and see the difference: everything that the services run is here but gRPC.
"""

import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from protos.step import GroupConfig, RowSampling
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from worker_svc.assembly import describe
from worker_svc.config import WorkerConfig
from worker_svc.cpu_runner import CpuRunner
from worker_svc.fingerprint import Fingerprint
from worker_svc.models.load import check_snapshot, load_model, resolve_dtype
from worker_svc.ops import invariance
from worker_svc.ops.cpu import CpuOps
from worker_svc.ops.invariance import Numerics, probe

MAX_LEN = 320
Told = dict[tuple[int, int], list[bytes]]  # (request, choice) -> each position's token, logprob and alternatives


class ThreadGroup:
    """A tensor-parallel group whose ranks are threads."""

    def __init__(self, rank: int, tp: int, shared: list, barrier: threading.Barrier) -> None:
        self.rank, self.tp, self._shared, self._barrier = rank, tp, shared, barrier

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._shared[self.rank] = x
        self._barrier.wait()
        gathered = torch.stack(list(self._shared))
        self._barrier.wait()
        return gathered

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self.all_gather(x).sum(0)

    def barrier(self) -> None:
        self._barrier.wait()

    def abort(self) -> None:
        self._barrier.abort()

    def close(self) -> None:
        pass


class SmallEngine:
    """One model at one tp and dtype; `run` may be called any number of times, each on an empty cache.

    plain: the ops are the ones in torch, whatever the worker would choose here.
    """

    def __init__(self, folder, tp: int = 1, dtype: str = "float32", plain: bool = False) -> None:
        self.tp = tp
        checked = check_snapshot(folder, tp)
        self.vocab_size = checked.spec.vocab_size
        self.runners = []
        for rank in range(tp):
            ops = plain_ops(getattr(torch, dtype)) if plain else None
            model = load_model(folder, rank=rank, tp=tp, dtype=dtype, ops=ops)
            facts = Fingerprint(**{**dict.fromkeys(Fingerprint.__dataclass_fields__, ""), "kv_dtype": dtype})
            config = WorkerConfig(folder, rank, tp, dtype=dtype)
            self.runners.append(
                CpuRunner(model, describe(config, checked, resolve_dtype(dtype, checked.spec), 1 << 24, facts))
            )

    def run(self, requests: list[Request], *, stagger=0, depth=1, lose_every=0, **options) -> Told:
        """All requests together, one more admitted every `stagger` steps. options: fields of CoreConfig.

        lose_every: after so many steps the workers are gone, with everything in flight and in their caches.
        """
        sizes = {"num_blocks": 400, "block_size": 16, "max_num_seqs": 48, "max_batch_tokens": 1024} | options
        core = Scheduler(CoreConfig(**sizes, max_seq_len=MAX_LEN, pipeline_depth=depth))
        fields = {name: sizes[name] for name in ("num_blocks", "block_size", "max_num_seqs", "max_batch_tokens")}
        config = GroupConfig(1, **fields, max_seq_len=MAX_LEN, pipeline_depth=depth)
        shared, barrier = [None] * self.tp, threading.Barrier(self.tp)
        told: Told = {(request.key, choice): [] for request in requests for choice in range(request.n)}
        waiting, now = list(requests), 0.0
        with ThreadPoolExecutor(self.tp) as pool:
            groups = [ThreadGroup(rank, self.tp, shared, barrier) for rank in range(self.tp)]

            def join(config):
                list(pool.map(lambda runner, group: runner.join(config, group), self.runners, groups))

            join(config)
            flying: list = []
            while waiting or core.has_work:
                while waiting and (not stagger or now % stagger == 0):
                    core.submit(waiting.pop(0), now)
                    if stagger:
                        break
                now += 1
                if lose_every and now % lose_every == 0:
                    flying.clear()
                    config = replace(config, epoch=config.epoch + 1)
                    join(config)
                    core.abort_step(config.epoch, now)
                while core.can_plan and (batch := core.plan(now)) is not None:
                    flying.append(_launch(pool, self.runners, batch))
                if flying:
                    _hear(core.commit(flying.pop(0), now).tokens, told)
        self.preemptions = core.stats().counters.preemptions
        return told


def plain_ops(dtype: torch.dtype) -> CpuOps:
    """The torch ops with the paths that the self-test finds for them."""
    rows, tiles = invariance._attention(invariance.accumulator(dtype))
    return CpuOps(dtype, Numerics(probe(dtype).matmul, rows, tiles))


def _launch(pool, runners, batch):
    """Every rank at once; rank 0's result."""
    return next(iter(list(pool.map(lambda runner: runner.launch(batch).result(), runners))))


def _hear(tokens, told: Told) -> None:
    ends = np.cumsum(tokens.alternative_counts)
    for i, (key, choice) in enumerate(zip(tokens.keys.tolist(), tokens.choices.tolist())):
        part = slice(ends[i] - tokens.alternative_counts[i], ends[i])
        words = tokens.alternative_ids[part].tobytes() + tokens.alternative_logprobs[part].tobytes()
        told[key, choice].append(struct.pack("<if", tokens.token_ids[i], tokens.logprobs[i]) + words)


def draw_requests(count: int, vocab_size: int, seed: int = 0) -> list[Request]:
    """Requests that share prompts, cross blocks and the 256-key split, and differ in settings."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, vocab_size, 270).astype(np.int32)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"top_k": 5},
        {"top_k": 50, "temperature": 1.5},
        {"top_p": 0.8, "presence_penalty": 0.5},
        {"min_p": 0.05, "repetition_penalty": 1.2},
    ]
    requests = []
    for key in range(count):
        kind = kinds[key % len(kinds)]
        own = rng.integers(0, vocab_size, int(rng.integers(1, 24))).astype(np.int32)
        prompt = np.concatenate([shared[: int(rng.choice((0, 5, 40, 250)))], own])
        output = int(rng.choice((4, 9, 16)))
        sampling = RowSampling(**kind, logprobs=int(rng.choice((0, 3))))
        requests.append(
            Request(key, f"r{key}", prompt, sampling, seed=key % 5, max_tokens=output, n=1 + (key % 7 == 3))
        )
    return requests


def alone(engine: SmallEngine, requests: list[Request]) -> Told:
    """Each request by itself, on an empty cache."""
    told: Told = {}
    for request in requests:
        told |= engine.run([request])
    return told


def count_differing(expected: Told, got: Told) -> int:
    """Positions; a length that differs counts too."""
    return sum(
        sum(a != b for a, b in zip(expected[name], got[name])) + abs(len(expected[name]) - len(got[name]))
        for name in got
    )


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
