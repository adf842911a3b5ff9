"""The slot table says what a batch leaves unsaid, and refuses what contradicts it."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from protos.step import Row, StepBatch, int32s
from worker_svc.slots import Contradiction, SlotTable


def row(slot, tokens, blocks, *, computed=0, prompt=None):
    return Row(
        slot=slot,
        name=f"r{slot}",
        token_ids=int32s(*tokens),
        num_prompt=prompt or len(tokens),
        num_computed=computed,
        block_ids=int32s(*blocks),
        seed=1,
    )


def table(**bounds):
    return SlotTable(4, 8, **{"block_size": 4, "num_blocks": 16} | bounds)


def test_a_prompt_is_cut_and_samples_only_at_its_end():
    slots = table()
    first = slots.apply(StepBatch(1, 1, rows=(row(2, [5, 6, 7], [3]),), slots=int32s(2), num_new=int32s(2)))
    assert first.token_ids.tolist() == [5, 6] and not first.samples.any()
    slots.drawn(first, int32s())
    last = slots.apply(StepBatch(1, 2, slots=int32s(2), num_new=int32s(1)))
    assert last.token_ids.tolist() == [7] and last.first_position.tolist() == [2] and last.samples.all()
    slots.drawn(last, int32s(9))
    steady = slots.apply(
        StepBatch(1, 3, extended_slots=int32s(2), extended_counts=int32s(1), extended_blocks=int32s(8))
    )
    assert steady.token_ids.tolist() == [9] and steady.first_position.tolist() == [3]
    assert steady.block_tables.tolist() == [[3, 8]]


def test_steady_rows_need_no_word_and_held_rows_rest():
    slots = table()
    rows = (row(0, [1], [0]), row(1, [2], [1]), row(3, [4], [2]))
    plan = slots.apply(StepBatch(1, 1, rows=rows))
    assert plan.slots.tolist() == [0, 1, 3] and plan.query_starts.tolist() == [0, 1, 2, 3]
    slots.drawn(plan, int32s(11, 12, 13))
    plan = slots.apply(StepBatch(1, 2, held=int32s(1)))
    assert plan.slots.tolist() == [0, 3] and plan.token_ids.tolist() == [11, 13]
    slots.drawn(plan, int32s(21, 23))
    plan = slots.apply(StepBatch(1, 3, retired=int32s(0)))
    assert plan.slots.tolist() == [1, 3] and plan.token_ids.tolist() == [12, 23]


def test_a_token_drawn_elsewhere_is_fed():
    slots = table()
    slots.apply(StepBatch(1, 1, rows=(row(0, [1, 2], [0]),), slots=int32s(0), num_new=int32s(2)))
    assert slots.apply(StepBatch(1, 2)).slots.tolist() == []  # computed all that it knows
    plan = slots.apply(StepBatch(1, 3, fed_slots=int32s(0), fed_token_ids=int32s(7)))
    assert plan.token_ids.tolist() == [7] and plan.samples.all()


def test_a_slot_may_be_taken_again_in_the_step_that_frees_it():
    slots = table()
    slots.drawn(slots.apply(StepBatch(1, 1, rows=(row(0, [1], [0, 1]),))), int32s(5))
    plan = slots.apply(StepBatch(1, 2, retired=int32s(0), rows=(row(0, [8], [6]),)))
    assert plan.token_ids.tolist() == [8] and plan.block_tables.tolist() == [[6]]


CONTRADICTIONS = {
    "retired twice": StepBatch(1, 2, retired=int32s(0, 0)),
    "retired while free": StepBatch(1, 2, retired=int32s(2)),
    "introduced while live": StepBatch(1, 2, rows=(row(0, [1], [5]),)),
    "slot out of range": StepBatch(1, 2, rows=(row(4, [1], [5]),)),
    "block out of range": StepBatch(1, 2, rows=(row(1, [1], [16]),)),
    "nothing left to compute": StepBatch(1, 2, rows=(row(1, [1, 2], [5], computed=2),)),
    "prompt longer than known": StepBatch(1, 2, rows=(row(1, [1, 2], [5], prompt=3),)),
    "extended while free": StepBatch(
        1, 2, extended_slots=int32s(3), extended_counts=int32s(1), extended_blocks=int32s(1)
    ),
    "table too long": StepBatch(
        1, 2, extended_slots=int32s(0), extended_counts=int32s(8), extended_blocks=int32s(*range(8))
    ),
    "fed before computed": StepBatch(1, 2, fed_slots=int32s(0), fed_token_ids=int32s(1)),
    "computes more than known": StepBatch(1, 2, slots=int32s(0), num_new=int32s(2)),
    "listed twice": StepBatch(1, 2, slots=int32s(0, 0), num_new=int32s(1, 1)),
    "computes nothing": StepBatch(1, 2, slots=int32s(0), num_new=int32s(0)),
    "listed and held": StepBatch(1, 2, slots=int32s(0), num_new=int32s(1), held=int32s(0)),
    "negative slot": StepBatch(1, 2, held=int32s(-1)),
    "a step is missing": StepBatch(1, 3),
    "a step comes twice": StepBatch(1, 1),
    "writes past its blocks": StepBatch(1, 2, rows=(row(1, [1, 2, 3, 4, 5], [5]),), slots=int32s(1), num_new=int32s(5)),
}


@pytest.mark.parametrize("batch", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_what_contradicts_the_table_is_refused(batch):
    slots = table()
    slots.drawn(slots.apply(StepBatch(1, 1, rows=(row(0, [1], [0]),))), int32s(5))
    with pytest.raises(Contradiction):
        slots.apply(batch)
    control = table()
    control.drawn(control.apply(StepBatch(1, 1, rows=(row(0, [1], [0]),))), int32s(5))
    assert control.apply(StepBatch(1, 2)).token_ids.tolist() == [5]


class Naive:
    """protos/step.py word for word, one row at a time."""

    def __init__(self):
        self.rows = {}

    def apply(self, batch):
        for slot in batch.retired.tolist():
            del self.rows[slot]
        for new in batch.rows:
            self.rows[new.slot] = [list(new.token_ids), new.num_computed, list(new.block_ids)]
        at = 0
        for slot, count in zip(batch.extended_slots.tolist(), batch.extended_counts.tolist()):
            self.rows[slot][2] += batch.extended_blocks[at : at + count].tolist()
            at += count
        listed = dict(zip(batch.slots.tolist(), batch.num_new.tolist()))
        plan = []
        for slot in sorted(self.rows):
            tokens, computed, blocks = self.rows[slot]
            steady = len(tokens) - computed == 1 and slot not in batch.held.tolist()
            if new := listed.get(slot, int(steady)):
                self.rows[slot][1] += new
                done = computed + new == len(tokens)
                plan.append((slot, computed, tokens[computed : computed + new], done, list(blocks)))
        return plan

    def drawn(self, plan, tokens):
        for (slot, *_), token in zip([entry for entry in plan if entry[3]], tokens):
            self.rows[slot][0].append(token)


def told(plan):
    starts = plan.query_starts
    return [
        (slot, first, plan.token_ids[starts[i] : starts[i + 1]].tolist(), bool(plan.samples[i]))
        for i, (slot, first) in enumerate(zip(plan.slots.tolist(), plan.first_position.tolist()))
    ]


def random_batch(random, seq, naive):
    """Any legal batch."""
    live = sorted(naive.rows)
    retired = [slot for slot in live if random.random() < 0.2]
    free = [slot for slot in range(6) if slot not in live or slot in retired]
    rows = []
    for slot in free:
        if random.random() < 0.5:
            tokens = [random.randrange(100) for _ in range(random.randrange(1, 9))]
            rows.append(row(slot, tokens, random.sample(range(64), 5), computed=random.randrange(len(tokens))))
    counts = {s: len(naive.rows[s][0]) - naive.rows[s][1] for s in live if s not in retired}
    counts |= {r.slot: len(r.token_ids) - r.num_computed for r in rows}
    pick = {slot: random.randrange(1, n + 1) for slot, n in counts.items() if n and random.random() < 0.4}
    held = [slot for slot in counts if slot not in pick and random.random() < 0.2]
    extended = [slot for slot in counts if random.random() < 0.2]
    order = list(pick)
    random.shuffle(order)
    return StepBatch(
        1,
        seq,
        retired=int32s(*retired),
        rows=tuple(rows),
        extended_slots=int32s(*extended),
        extended_counts=int32s(*[2] * len(extended)),
        extended_blocks=int32s(*[random.randrange(64) for _ in range(2 * len(extended))]),
        slots=int32s(*order),
        num_new=int32s(*[pick[slot] for slot in order]),
        held=int32s(*held),
    )


def test_the_table_equals_the_text_of_the_contract():
    for seed in range(200):
        _compare(Random(seed), SlotTable(6, 256))


def _compare(random, slots):
    naive = Naive()
    for seq in range(1, 13):
        batch = random_batch(random, seq, naive)
        plan, expected = slots.apply(batch), naive.apply(batch)
        assert told(plan) == [entry[:4] for entry in expected]
        for i, entry in enumerate(expected):
            assert plan.block_tables[i, : len(entry[4])].tolist() == entry[4]
            assert not plan.block_tables[i, len(entry[4]) :].any()
        tokens = [random.randrange(100) for entry in expected if entry[3]]
        slots.drawn(plan, int32s(*tokens))
        naive.drawn(expected, tokens)


class _ForgetsRetired(SlotTable):
    def _retire(self, slots):
        super()._retire(slots[:-1])


class _IgnoresHeld(SlotTable):
    def apply(self, batch):
        return super().apply(replace(batch, held=int32s()))


class _DropsDrawn(SlotTable):
    def drawn(self, plan, token_ids):
        super().drawn(plan, np.zeros_like(token_ids))


class _ExtendsFromTheFront(SlotTable):
    def _extend(self, slots, counts, blocks):
        super()._extend(slots, counts, blocks[::-1])


@pytest.mark.parametrize("mutant", [_ForgetsRetired, _IgnoresHeld, _DropsDrawn, _ExtendsFromTheFront])
def test_the_comparison_kills_a_wrong_table(mutant):
    with pytest.raises((AssertionError, Contradiction)):
        for seed in range(40):
            _compare(Random(seed), mutant(6, 256))
