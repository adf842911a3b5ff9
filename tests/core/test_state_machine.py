"""Hypothesis looks for a history that breaks a promise; every invariant is checked after every call."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from scheduler_svc.core.decision_log import RecordedScheduler, replay
from scheduler_svc.core.request import NeverFits, Overloaded
from tests.core.engine import Bench
from tests.core.fake import solo

FAMILIES = [np.random.default_rng(seed).integers(0, 97, 60) for seed in range(3)]


class Parts(list[list[str]]):
    """A log that begins anew every hundred calls."""

    def begin(self, header):
        self.append([header])

    def write(self, line):
        self[-1].append(line)
        return len(self[-1]) > 100


class Histories(RuleBasedStateMachine):
    events = 0

    @initialize(
        block_size=st.sampled_from([1, 2, 4, 7]),
        num_tokens=st.integers(16, 120),
        slots=st.integers(1, 6),
        budget=st.integers(1, 24),
        depth=st.integers(1, 3),
        at_scheduler=st.booleans(),
        cache=st.booleans(),
        forecast=st.booleans(),
        fair=st.booleans(),
        watermark=st.sampled_from([0.0, 0.3]),
        ageing=st.sampled_from([0.0, 5.0]),
        order=st.sampled_from(["arrival", "makespan"]),
        queued_tokens=st.sampled_from([60, 10_000]),
    )
    def start(
        self,
        block_size,
        num_tokens,
        slots,
        budget,
        depth,
        at_scheduler,
        cache,
        forecast,
        fair,
        watermark,
        ageing,
        order,
        queued_tokens,
    ):
        self.parts = Parts()
        self.bench = Bench(
            num_blocks=max(2, num_tokens // block_size),
            block_size=block_size,
            max_num_seqs=slots,
            max_batch_tokens=budget,
            max_seq_len=100,
            max_queue=10,
            pipeline_depth=1 if at_scheduler else depth,
            sample_at_scheduler=at_scheduler,
            prefix_cache=cache,
            forecast=forecast,
            fair_tenants=fair,
            watermark=watermark,
            ageing_s=ageing,
            order=order,
            max_queued_tokens=queued_tokens,
            scheduler=lambda config: RecordedScheduler(config, self.parts),
            poisoned=lambda name, index: name.startswith("nan") and index == 2,
        )

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 40),
        max_tokens=st.integers(0, 20),
        n=st.integers(1, 3),
        stops=st.booleans(),
        scores=st.booleans(),
        poisoned=st.integers(0, 9),
        priority=st.integers(-1, 1),
        patience=st.one_of(st.none(), st.integers(1, 30)),
    )
    def submit(self, family, length, max_tokens, n, stops, scores, poisoned, priority, patience):
        options = {"eos_ids": frozenset(range(10))} if stops else {}
        if poisoned == 0:
            options["request_id"] = f"nan{self.bench._next_key}"
        if scores or max_tokens == 0:
            options["prompt_logprobs"] = 1
        if patience:
            options["deadline"] = self.bench.now + patience
        try:
            self.bench.submit(
                FAMILIES[family][:length], max_tokens, n=n, priority=priority, tenant=str(family), **options
            )
        except (NeverFits, Overloaded):
            pass
        self.bench.verify()

    @invariant()
    def count(self):
        Histories.events += 1

    @precondition(lambda self: self.bench.core.can_plan)
    @rule()
    def plan(self):
        self.bench.plan()
        self.bench.take(self.bench.core.take_events())

    @precondition(lambda self: self.bench.waiting)
    @rule()
    def commit(self):
        self.bench.commit()

    @precondition(lambda self: self.bench.core.has_work)
    @rule(steps=st.integers(1, 12))
    def go_on(self, steps):
        for _ in range(steps):
            self.bench.step()

    @precondition(lambda self: self.bench.core.has_work)
    @rule(data=st.data())
    def cancel(self, data):
        live = sorted(item for item, told in self.bench.told.items() if not told.finished)
        key, choice = data.draw(st.sampled_from(live))
        self.bench.cancel(key, data.draw(st.sampled_from([None, choice])))

    @precondition(lambda self: self.bench.core.has_work)
    @rule(data=st.data())
    def stop(self, data):
        live = sorted(item for item, told in self.bench.told.items() if not told.finished)
        key, choice = data.draw(st.sampled_from(live))
        self.bench.stopped.add((key, choice))
        self.bench.core.stop(key, choice, len(self.bench.told[key, choice].tokens), self.bench.now)
        self.bench.verify()
        self.bench.take(self.bench.core.take_events())

    @rule()
    def lose_workers(self):
        self.bench.lose_workers()

    def teardown(self):
        if not hasattr(self, "bench"):
            return
        self.bench.run()
        for part in self.parts[-2:]:
            assert replay(part) == len(part) - 1, "the log replays"
        for (key, choice), told in self.bench.told.items():
            expected, reason = solo(self.bench.requests[key], choice)
            assert told.tokens == expected[: len(told.tokens)]
            if told.finished[0].reason.value in ("stop", "length") and (key, choice) not in self.bench.stopped:
                assert told.tokens == expected and told.finished[0].reason.value == reason


def histories(examples: int, seed_free: bool) -> None:
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=examples,
            stateful_step_count=100,
            deadline=None,
            derandomize=not seed_free,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_ten_thousand_events_break_no_promise():
    Histories.events = 0
    histories(150, seed_free=False)
    assert Histories.events >= 10_000


@pytest.mark.slow
def test_a_hundred_thousand_fresh_events_break_no_promise():
    histories(1500, seed_free=True)
