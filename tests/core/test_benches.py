"""The benches of the core run, and a small day breaks no promise."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.core_bench import pack
from bench.seed_scenario import MINIMAL, by_core, reachable
from bench.simulate_day import simulate
from bench.wake_bench import measure
from scheduler_svc.core.residency import Residency

ROOT = Path(__file__).resolve().parents[2]


def test_a_small_day_ends_every_choice_once_and_loses_no_block():
    day = simulate(2500, seed=1, check_every=100)
    assert day.refused > 0 and day.preemptions > 0 and day.epochs_lost >= 3, day
    assert {"stop", "length", "cancelled", "timeout"} <= set(day.finished)


def test_a_day_with_a_leak_is_noticed(monkeypatch):
    real = Residency.end

    def leak(self, sequence, *, trusted=True):
        if sequence.key == 700:
            self.rows.num_blocks[sequence.slot] -= 1
        real(self, sequence, trusted=trusted)

    monkeypatch.setattr(Residency, "end", leak)
    with pytest.raises(AssertionError):
        simulate(1000, seed=1)


def test_a_heavy_tailed_trace_is_packed_tightly():
    """The pool is full until the last request has started; after that the longest ones run out by themselves."""
    packing = pack(150, slots=64, num_blocks=5000)
    full_steps = packing.makespan_steps * (1 - packing.last_arrivals_share)
    assert full_steps <= 1.05 * packing.ideal_steps
    assert packing.recomputed_tokens <= 0.12 * 150 * 3000
    for_makespan = pack(150, slots=64, num_blocks=5000, order="makespan")
    assert for_makespan.makespan_steps <= 0.95 * packing.makespan_steps


def test_the_core_bench_prints_its_keys():
    command = [sys.executable, "-m", "bench.core_bench", "--rows", "8", "--json"]
    answer = json.loads(
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout
    )
    assert answer["plan_commit_ms"] > 0 and answer["codec_us"] > 0 and answer["steps_s"] > 0
    assert answer["message_bytes"] < 64


def test_no_schedule_that_recomputes_nothing_is_shorter_than_one_after_the_other_in_the_smallest_pool():
    """In a pool that just holds the long one nobody runs beside it, and of the others no two side by side."""
    assert reachable(17, 0, 64 + 6 * 40) and not reachable(17, 0, 64 + 6 * 40 - 1)
    assert by_core(17, forecast=True).tokens <= 1.15 * MINIMAL


def test_an_idle_engine_wakes_at_once_and_does_not_wait_busily():
    wakes = measure(20)
    assert wakes.median_ms < 10 and wakes.idle_cpu_share < 0.05
