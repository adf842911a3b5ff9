"""A runner without a model, and groups of workers around it in this process: the real services, arithmetic by rule.

The rule: the token after a row's tokens is a hash of the seed, the choice, the number of tokens and their sum. Every
rank exchanges a word with the others in each step, as a model would, so that a rank that is missing is missed.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import numpy as np

from protos import codec, worker_pb2_grpc
from protos import worker_pb2 as pb
from protos.step import Description, Row, StepBatch, StepResult, int32s
from worker_svc.engine import LocalExecutor
from worker_svc.service import WorkerService
from worker_svc.slots import SlotTable

VOCABULARY = 97


def next_token(seed, choice, tokens):
    return int((seed * 31 + choice * 7 + len(tokens) * 13 + int(np.sum(tokens)) * 5) % VOCABULARY)


def expected_tokens(seed, choice, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(seed, choice, tokens))
    return tokens[len(prompt) :]


class ThreadGroup:
    """Ranks that are threads of this process."""

    def __init__(self, barrier):
        self.barrier = barrier

    def meet(self):
        self.barrier.wait()

    def abort(self):
        self.barrier.abort()


class _Done:
    def __init__(self, result):
        self._result = result

    def result(self):
        return self._result


class ScriptedRunner:
    """`before` is called with each batch at its launch, `on_join` with each config: tests act there."""

    def __init__(
        self, rank=0, tp=1, before=lambda batch: None, change=lambda result: result, on_join=lambda config: None
    ):
        self._on_join = on_join
        self._rank, self._tp = rank, tp
        self._before, self._change = before, change
        self.joined = []

    def describe(self):
        return Description(
            rank=self._rank,
            tp=self._tp,
            model="scripted",
            model_path="scripted",
            vocab_size=VOCABULARY,
            max_position_embeddings=4096,
            num_layers=1,
            kv_heads=1,
            head_dim=1,
            dtype="float32",
            kv_dtype="float32",
            device="cpu",
            memory_bytes=1 << 20,
            kv_bytes_per_token=64,
            eos_token_ids=(),
            bos_token_id=None,
            fingerprint={"numerics": "scripted"},
        )

    def join(self, config, group):
        self.joined.append(config)
        self._on_join(config)
        self._config, self._group = config, group
        num_blocks = config.num_blocks or 64
        self._slots = SlotTable(config.max_num_seqs, 256, block_size=config.block_size, num_blocks=num_blocks)
        return num_blocks

    def launch(self, batch):
        self._before(batch)
        if hasattr(self._group, "meet"):
            self._group.meet()
        plan = self._slots.apply(batch)
        drawn, logits = [], []
        for i, row in enumerate(plan.rows):
            if plan.samples[i]:
                tokens = self._slots.tokens(row.slot)
                drawn.append(next_token(row.seed, row.choice, tokens))
                if row.sampling.return_logits or self._config.sample_at_scheduler:
                    line = np.zeros(VOCABULARY, np.float32)
                    line[drawn[-1]] = 1
                    logits.append(line)
        if not self._config.sample_at_scheduler:
            self._slots.drawn(plan, int32s(*drawn))
        return _Done(
            self._change(
                StepResult(
                    batch.epoch,
                    batch.seq,
                    0,
                    token_ids=int32s(*([] if self._config.sample_at_scheduler else drawn)),
                    logprobs=np.zeros(0 if self._config.sample_at_scheduler else len(drawn), np.float32),
                    logits=np.stack(logits) if logits and self._rank == 0 else None,
                )
            )
        )


class ScriptedRendezvous:
    def __init__(self, barrier):
        self.address = "in this process"
        self._barrier = barrier

    def form(self):
        return ThreadGroup(self._barrier)


class ScriptedWorker:
    """One rank's real service on a loopback port."""

    def __init__(self, rank, tp, barriers, runner, interceptors=()):
        def rendezvous(config, store):
            with barriers.lock:
                barrier = barriers.of.setdefault(config.epoch, threading.Barrier(tp, timeout=config.step_timeout_s))
            return ScriptedRendezvous(barrier)

        self.runner = runner
        self.service = WorkerService(rank, tp, pb.Description(rank=rank, tp=tp), rendezvous)
        self.engine = LocalExecutor(runner)
        self.service.ready(self.engine)
        self.server = grpc.server(
            ThreadPoolExecutor(16), options=codec.WORKER_CHANNEL_OPTIONS, interceptors=list(interceptors)
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(self.service, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{self.port}"
        self.server.start()

    def stop(self):
        self.service.close()
        self.server.stop(0).wait()


class Barriers:
    def __init__(self):
        self.lock = threading.Lock()
        self.of = {}


@contextmanager
def workers(tp=1, interceptors=(), **hooks):
    """`hooks[f"rank{r}"]` are keyword arguments of that rank's ScriptedRunner."""
    barriers = Barriers()
    group = [
        ScriptedWorker(rank, tp, barriers, ScriptedRunner(rank, tp, **hooks.get(f"rank{rank}", {})), interceptors)
        for rank in range(tp)
    ]
    try:
        yield group
    finally:
        for worker in group:
            worker.stop()


def introduce(slot, prompt, seed=1, blocks=range(16), **settings):
    return Row(
        slot=slot,
        name=f"row{slot}",
        token_ids=int32s(*prompt),
        num_prompt=len(prompt),
        num_computed=0,
        block_ids=int32s(*blocks),
        seed=seed,
        **settings,
    )


def first_step(epoch, *rows, seq=1):
    return StepBatch(
        epoch,
        seq,
        rows=rows,
        slots=int32s(*(row.slot for row in rows)),
        num_new=int32s(*(len(row.token_ids) for row in rows)),
    )


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.01)
