"""Sampling at the scheduler gives, column for column, what sampling at the worker gives."""

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from protos.step import NO_INTS, GroupConfig, Row, RowSampling, StepBatch, StepResult, int32s, step_digest
from scheduler_svc.executor import EpochLost
from scheduler_svc.host_sampling import HostSampling
from tests.sampling.rows import floats, ids
from worker_svc.sampling import SamplerRow, sample
from worker_svc.slots import SlotTable

VOCAB, SLOTS = 300, 4
KINDS = [
    RowSampling(temperature=0.0, logprobs=2),
    RowSampling(temperature=0.7, logprobs=1, presence_penalty=0.8, return_logits=True),
    RowSampling(top_k=9, top_p=0.9, raw_logprobs=True, logprobs=3),
    RowSampling(bias_ids=ids(5, 6), bias_values=floats(2, 3), min_tokens=3, stop_ids=ids(5)),
]


def fake_logits(tokens: np.ndarray) -> np.ndarray:
    """A model: logits are a function of the tokens so far; one of them is a NaN now and then."""
    rng = np.random.default_rng([len(tokens), *np.maximum(tokens[-3:], 0).tolist()])
    z = (rng.standard_normal(VOCAB) * 3).astype(np.float32)
    if len(tokens) % 11 == 0:
        z[7] = np.nan
    return z


class Worker:
    """An executor over that model, drawing tokens itself or leaving them to the scheduler."""

    def __init__(self) -> None:
        self.on_lost = None

    def describe(self):
        raise NotImplementedError

    def join(self, config: GroupConfig) -> int:
        self.at_scheduler = config.sample_at_scheduler
        self.table = SlotTable(config.max_num_seqs, config.max_seq_len // config.block_size)
        self.rows: dict[int, SamplerRow] = {}
        return 64

    def step(self, batch: StepBatch) -> Future[StepResult]:
        plan = self.table.apply(batch)
        for row in batch.rows:
            self.rows[row.slot] = SamplerRow(row)
        slots = plan.slots[plan.samples].tolist()
        z = np.stack([fake_logits(self.table.tokens(slot)) for slot in slots]) if slots else None
        result = StepResult(batch.epoch, batch.seq, 0)
        if self.at_scheduler:
            if z is not None:
                z.flags.writeable = False  # as bytes from the wire are
            result = replace(result, logits=z)
        elif slots:
            rows = [self.rows[slot] for slot in slots]
            drawn = sample(z, rows)
            self.table.drawn(plan, drawn.token_ids)
            for row, token in zip(rows, drawn.token_ids.tolist()):
                row.append(token)
            asking = [row.sampling.return_logits for row in rows]
            columns = {name: getattr(drawn, name) for name in type(drawn).__slots__}
            digest = step_digest(batch.epoch, batch.seq, drawn.token_ids, drawn.logprobs, drawn.failed_slots)
            result = replace(result, digest=digest, logits=z[asking] if any(asking) else None, **columns)
        done: Future[StepResult] = Future()
        done.set_result(result)
        return done

    def close(self) -> None:
        pass


def introduce(slot: int, generation: int) -> Row:
    prompt = np.arange(3 + slot + generation, dtype=np.int32)
    blocks = np.arange(8, dtype=np.int32) + 8 * slot
    return Row(slot, f"r{slot}.{generation}", prompt, len(prompt), 0, blocks, 17 * slot + generation, slot, KINDS[slot])


def run(executor, at_scheduler: bool, steps: int = 40) -> list[StepResult]:
    """Rows come and go; prefill in two chunks; tokens are fed back where the workers do not draw."""
    config = GroupConfig(1, num_blocks=64, max_num_seqs=SLOTS, max_seq_len=256, sample_at_scheduler=at_scheduler)
    executor.join(config)
    table = SlotTable(SLOTS, 16)
    results, fed_slots, fed_tokens, age = [], NO_INTS, NO_INTS, [0] * SLOTS
    for seq in range(steps):
        slot, generation = seq % SLOTS, seq // SLOTS
        starts = generation % 3 == 0
        ends = starts and age[slot]
        live = fed_slots != slot if ends else np.ones(len(fed_slots), bool)
        row = introduce(slot, generation)
        batch = StepBatch(
            1,
            seq,
            retired=int32s(slot) if ends else NO_INTS,
            rows=(row,) if starts else (),
            slots=int32s(slot) if starts else NO_INTS,
            num_new=int32s(2) if starts else NO_INTS,
            fed_slots=fed_slots[live] if at_scheduler else NO_INTS,
            fed_token_ids=fed_tokens[live] if at_scheduler else NO_INTS,
        )
        later = [other for other in range(SLOTS) if age[other] == 1 and not (other == slot and starts)]
        if later:  # the second chunk: what is left of the prompt
            rest = [int(np.count_nonzero(table.tokens(other) >= 0)) - 2 for other in later]
            batch = replace(
                batch,
                slots=np.concatenate([batch.slots, int32s(*later)]),
                num_new=np.concatenate([batch.num_new, int32s(*rest)]),
            )
        for other in range(SLOTS):
            age[other] = 1 if other == slot and starts else age[other] + 1 if age[other] else 0
        result = executor.step(batch).result()
        results.append(result)
        plain = replace(batch, fed_slots=NO_INTS, fed_token_ids=NO_INTS)
        plan = table.apply(plain)
        table.drawn(plan, result.token_ids)
        fed_slots, fed_tokens = plan.slots[plan.samples], result.token_ids
    return results


COLUMNS = ("token_ids", "logprobs", "alternative_ids", "alternative_logprobs", "failed_slots")


def check_same(host, worker) -> None:
    for one, other in zip(host, worker, strict=True):
        for name in COLUMNS:
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes(), (one.seq, name)
        assert one.digest == other.digest or not len(one.token_ids)
        assert (one.logits is None) == (other.logits is None)
        if one.logits is not None:
            assert np.array_equal(one.logits, other.logits, equal_nan=True)


def test_the_scheduler_draws_what_the_worker_draws():
    worker = run(Worker(), at_scheduler=False)
    assert sum(len(result.token_ids) for result in worker) > 60
    assert any(len(result.failed_slots) for result in worker) and any(result.logits is not None for result in worker)
    check_same(run(HostSampling(Worker()), at_scheduler=True), worker)


def test_a_scheduler_that_forgets_what_it_fed_is_caught(monkeypatch):
    worker = run(Worker(), at_scheduler=False)
    monkeypatch.setattr("scheduler_svc.host_sampling.SamplerRow.append", lambda self, token: None)
    host = run(HostSampling(Worker()), at_scheduler=True)
    with pytest.raises(AssertionError):
        check_same(host, worker)


def test_losses_pass_through_and_contradictions_end_the_epoch():
    executor = HostSampling(Worker())
    with pytest.raises(EpochLost):
        executor.step(StepBatch(1, 0)).result()
    executor.on_lost = print
    assert executor._executor.on_lost is print
    executor.join(GroupConfig(1, max_num_seqs=2, max_seq_len=64, sample_at_scheduler=True))
    with pytest.raises(EpochLost):
        executor.step(StepBatch(1, 0, retired=int32s(1))).result()
