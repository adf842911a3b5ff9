"""Under pressure: little is computed twice, nobody starves, running streams keep their pace."""

import numpy as np
import pytest

from scheduler_svc.core.ledger import MAX_WASTE, Ledger
from scheduler_svc.core.lengths import LengthHistory
from scheduler_svc.core.outlook import Outlook
from tests.core.engine import Bench

MINIMAL = 67 + 6 * 63  # tokens that need keys and values: the last of each is never fed back
POOLS = (20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40)


def seed_scenario(num_blocks: int, depth: int, forecast: bool) -> tuple[int, int]:
    """One long decoder and six arrivals; forward tokens and steps."""
    bench = Bench(
        num_blocks=num_blocks, max_batch_tokens=64, pipeline_depth=depth, forecast=forecast, check=num_blocks % 10 == 0
    )
    bench.submit(4, max_tokens=64)
    for _ in range(6):
        bench.submit(24, max_tokens=40)
    steps = bench.run()
    bench.assert_solo()
    return bench.fake.num_tokens, steps


# Steps of the best schedule that computes at most 1.15 times the minimum: an exhaustive search with perfect knowledge
# (`python -m bench.seed_scenario`), new ones in order of arrival, the youngest preempted, one step in flight.
BEST = dict(zip(POOLS, (259, 233, 197, 177, 154, 145, 130, 123, 118, 111, 103)))


@pytest.mark.parametrize("depth", [1, 2])
def test_growth_does_not_thrash(depth):
    """At most 1.15 times the minimum is computed, where admitting what fits now computes up to 1.45 times.

    What is not computed again must be waited for: with so little of it no schedule is as short as the naive one in
    pools of 20 to 30 blocks (BEST). Ours stays within 4 % of the best over all pools.
    """
    naive = [seed_scenario(pool, depth, forecast=False) for pool in POOLS]
    ours = [seed_scenario(pool, depth, forecast=True) for pool in POOLS]
    assert max(tokens for tokens, _steps in ours) <= 1.15 * MINIMAL
    assert min(tokens for tokens, _steps in naive) > 1.2 * MINIMAL
    steps = sum(steps for _tokens, steps in ours)
    assert steps <= 1.1 * sum(steps for _tokens, steps in naive)
    if depth == 1:
        assert steps <= 1.04 * sum(BEST.values())
        assert all(best > naive[i][1] for i, best in enumerate(BEST.values()) if POOLS[i] <= 30)


@pytest.mark.parametrize("depth", [1, 2])
def test_lengths_are_learned_where_max_tokens_says_nothing(depth):
    """Requests that may all fill the context, and mostly stop early, still run side by side."""

    def run(forecast: bool):
        bench = Bench(
            num_blocks=512,
            block_size=16,
            max_num_seqs=64,
            max_batch_tokens=512,
            max_seq_len=2048,
            pipeline_depth=depth,
            forecast=forecast,
            check=False,
            strict=False,
        )
        rng = np.random.default_rng(0)
        for _ in range(200):
            prompt = int(rng.integers(20, 200))
            bench.submit(prompt, max_tokens=2048 - prompt, eos_ids=frozenset({5}))
        return bench.run(), bench.core.stats().counters

    naive_steps, naive = run(False)
    steps, counters = run(True)
    assert steps <= 1.1 * naive_steps
    assert counters.recomputed_tokens < 0.5 * naive.recomputed_tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_no_two_requests_evict_each_other(depth):
    bench = Bench(num_blocks=20, pipeline_depth=depth, forecast=False)
    for _ in range(2):
        bench.submit(16, max_tokens=60)
    bench.run()
    bench.assert_solo()
    assert bench.core.stats().counters.preemptions <= 2


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("forecast", [True, False])
@pytest.mark.parametrize("blocks", [20, 24, 30])
def test_whoever_is_evicted_is_junior_to_all_that_stay(depth, forecast, blocks):
    """Seniority is a fixed order, so that eviction has no cycles: of any two only one can ever evict the other."""
    bench = Bench(num_blocks=blocks, pipeline_depth=depth, forecast=forecast)
    for i in range(8):
        bench.submit(20, max_tokens=50, priority=i % 2)

    def running():
        return {s for s in bench.core._residency.rows.sequences if s is not None and s.phase.value != "leaving"}

    evictions = 0
    while True:
        before, counts = running(), {s: s.preemptions for s in running()}
        if bench.core.can_plan and bench.plan() is not None:
            evicted = {s for s in before if s.preemptions > counts[s]}
            stay = before & running()
            evictions += len(evicted)
            for victim in evicted:
                for other in stay:
                    assert (victim.request.priority, -victim.order) < (other.request.priority, -other.order)
        elif bench.waiting:
            bench.commit()
        else:
            break
    bench.assert_solo()
    assert forecast or evictions >= 3


def test_the_youngest_of_the_lowest_priority_is_preempted():
    bench = Bench(num_blocks=26, forecast=False, prefix_cache=False)
    keys = [bench.submit(16, max_tokens=40, priority=priority) for priority in (0, 5, 0, 1)]
    order = []
    while bench.step():
        for sequence in bench.core._residency.queue:
            if sequence.preemptions and sequence.key not in order:
                order.append(sequence.key)
    bench.assert_solo()
    assert order[:2] == [keys[2], keys[0]]


def test_the_watermark_leaves_blocks_free_while_something_runs():
    for forecast in (True, False):
        bench = Bench(num_blocks=40, watermark=0.5, forecast=forecast, max_batch_tokens=200)
        for _ in range(5):
            bench.submit(24, max_tokens=4)
        bench.step()
        assert bench.core.stats().running == 3 and bench.core.stats().waiting_for["blocks"] == 1
        bench.run()
        bench.assert_solo()
    alone = Bench(num_blocks=8, watermark=0.9)
    alone.submit(24, max_tokens=8)
    alone.run()


# Fairness and latency


def test_a_huge_prompt_neither_stops_running_streams_nor_starves():
    bench = Bench(
        num_blocks=9000,
        block_size=16,
        max_num_seqs=16,
        max_batch_tokens=256,
        max_seq_len=110_000,
        check=False,
        strict=False,
    )
    running = [bench.submit(4, max_tokens=900) for _ in range(8)]
    for _ in range(3):
        bench.step()
    huge = bench.submit(100_000, max_tokens=3)
    small = []
    gaps = {key: 0 for key in running}
    steps = 0
    while not bench.told[huge, 0].finished:
        if steps % 10 == 0 and steps < 500:
            small.append(bench.submit(64, max_tokens=2))
        before = {key: len(bench.told[key, 0].tokens) for key in running}
        bench.step()
        steps += 1
        for key in running:
            if not bench.told[key, 0].finished:
                grew = len(bench.told[key, 0].tokens) > before[key]
                gaps[key] = max(gaps[key], 0 if grew else 1)
    assert not any(gaps.values()), "a token of every running stream in every step"
    assert steps < 2.2 * 100_000 / (256 - 8), "at least half of what decodes leave"
    bench.run()
    waits = [bench.told[key, 0].finished[0].queue_s for key in small]
    assert max(waits) <= 6, "small prompts pass it"


def test_waiting_long_enough_outranks_priority():
    bench = Bench(max_num_seqs=1, ageing_s=10)
    bench.submit(3, max_tokens=2, priority=1)
    low = bench.submit(3, max_tokens=2, priority=0)
    high = []
    while not bench.told[low, 0].finished:
        high.append(bench.submit(3, max_tokens=2, priority=1))
        bench.step()
        bench.step()
        assert len(high) < 30, "starved"
    assert len(high) >= 3, "and priority counted for something"
    bench.run()
    bench.assert_solo()
    never = Bench(max_num_seqs=1, ageing_s=0)
    never.submit(3, max_tokens=9, priority=1)
    low = never.submit(3, max_tokens=2, priority=0)
    for _ in range(30):
        never.submit(3, max_tokens=2, priority=1)
        never.step()
        never.step()
    assert not never.told[low, 0].finished, "without ageing, priority is all"


def backlog(order: str, num_blocks: int, depth: int = 1) -> tuple[int, Bench]:
    """Steps of 60 short requests and three long ones that come last."""
    bench = Bench(
        num_blocks=num_blocks, max_num_seqs=16, max_batch_tokens=128, order=order, pipeline_depth=depth, max_queue=100
    )
    for at in range(60):
        bench.submit(8, max_tokens=8 + at % 9)
    for _ in range(3):
        bench.submit(8, max_tokens=90)
    steps = bench.run()
    bench.assert_solo()
    return steps, bench


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [60, 100, 1000])
def test_for_a_makespan_what_would_outlast_all_others_starts_in_time(num_blocks, depth):
    by_arrival, _ = backlog("arrival", num_blocks, depth)
    steps, bench = backlog("makespan", num_blocks, depth)
    assert steps <= (0.97 if num_blocks == 60 else 0.85) * by_arrival
    first = [key for key in range(1, 17) if bench.told[key, 0].finished[0].queue_s <= 2]
    assert len(first) >= 6, "and until then those that came first"


def test_a_makespan_starves_nobody_and_respects_priority():
    """The short one is passed by longer ones that came within ageing_s of it, and by no other."""
    bench = Bench(max_num_seqs=2, order="makespan", ageing_s=10, num_blocks=1000)
    for _ in range(2):
        bench.submit(3, max_tokens=4)
    short = bench.submit(3, max_tokens=2)
    later = []
    for length in (20, 60, 180, 540):
        later.append(bench.submit(3, max_tokens=length))
        for _ in range(5):
            bench.step()
    bench.run()
    bench.assert_solo()
    started = {key: bench.told[key, 0].finished[0].queue_s + at for key, at in zip([short, *later], (0, 0, 5, 10, 15))}
    assert started[later[1]] < started[short] < started[later[3]]
    high = Bench(max_num_seqs=2, order="makespan")
    keys = [high.submit(3, max_tokens=n, priority=p) for n, p in ((4, 1), (4, 1), (2, 1), (90, 0), (3, 1))]
    high.run()
    waits = [high.told[key, 0].finished[0].queue_s for key in keys]
    assert max(waits) == waits[3], "whatever its length"


def test_nothing_is_known_of_a_length_that_a_stop_may_cut():
    for stops in (frozenset(), frozenset({500})):
        bench = Bench(max_num_seqs=2, order="makespan")
        keys = [bench.submit(3, max_tokens=n, stop_token_ids=stops) for n in (4, 4, 4, 4, 60)]
        bench.run()
        waits = [bench.told[key, 0].finished[0].queue_s for key in keys]
        assert (waits[4] < waits[3]) == (not stops)


def test_a_queue_ordered_for_a_makespan_does_not_keep_what_has_gone():
    bench = Bench(max_num_seqs=2, order="makespan", num_blocks=200, check=False, strict=False)
    bench.submit(3, max_tokens=300)
    for _ in range(2000):
        bench.submit(3, max_tokens=1)
        bench.step()
    kept = sum(map(len, bench.core._residency.queue._longest.values()))
    assert kept <= 200, f"{kept} entries"
    bench.run()
    bench.submit(3, max_tokens=1)
    bench.run()
    assert sum(map(len, bench.core._residency.queue._longest.values())) <= 1


def test_tenants_take_turns_by_tokens():
    bench = Bench(max_num_seqs=2, fair_tenants=True, num_blocks=256)
    greedy = [bench.submit(8, max_tokens=8, tenant="greedy") for _ in range(20)]
    modest = [bench.submit(8, max_tokens=8, tenant="modest") for _ in range(4)]
    bench.run()
    bench.assert_solo()
    last_modest = max(bench.told[key, 0].finished[0].queue_s for key in modest)
    earlier = sum(bench.told[key, 0].finished[0].queue_s <= last_modest for key in greedy)
    assert earlier <= 6, f"{earlier} of the greedy tenant's 20 went before the modest one's 4"


def test_stats_say_why_requests_wait():
    bench = Bench(num_blocks=8, max_num_seqs=2)
    for _ in range(3):
        bench.submit(4, max_tokens=28)
    bench.step()
    assert bench.core.stats().waiting_for == {"blocks": 1, "queue": 1}
    bench = Bench(max_num_seqs=2)
    for _ in range(4):
        bench.submit(4, max_tokens=20)
    bench.step()
    assert bench.core.stats().waiting_for == {"slots": 1, "queue": 1}
    bench = Bench(max_num_seqs=8, max_batch_tokens=8)
    bench.submit(100, max_tokens=2)
    bench.submit(4, max_tokens=2)
    bench.step()
    assert bench.core.stats().waiting_for == {"budget": 1}


def test_steady_rows_are_not_listed():
    bench = Bench(num_blocks=512, max_num_seqs=64, max_batch_tokens=256, block_size=16)
    for _ in range(64):
        bench.submit(3, max_tokens=60)
    bench.step()
    batch = bench.plan()
    columns = ("retired", "rows", "extended_slots", "fed_slots", "slots", "num_new", "held")
    assert [len(getattr(batch, name)) for name in columns] == [0] * 7
    bench.run()
    bench.assert_solo()


# The arithmetic of forecasts


def test_the_forecast_agrees_with_counting():
    rng = np.random.default_rng(0)
    for _ in range(200):
        size, count = int(rng.integers(1, 9)), int(rng.integers(1, 12))
        outlook = Outlook(rng.integers(0, 40, count), rng.integers(0, 50, count), rng.integers(0, 3, count))
        used = []
        for time in range(60):
            alive = [
                (p + time) // size + 1 - a
                for p, last, a in zip(outlook.position.tolist(), outlook.last.tolist(), outlook.adopted.tolist())
                if last >= time
            ]
            used.append(sum(alive))
        assert [outlook.usage(time, size) for time in range(60)] == used
        assert outlook.peak(size) == max(used)
        for limit in range(0, max(used) + 2, 3):
            first = next((time for time, blocks in enumerate(used) if blocks > limit), None)
            assert outlook.fills_at(limit, size) == first


def test_lengths_follow_their_history():
    history = LengthHistory()
    many = np.arange(1000)
    zero, cap, yes = np.zeros(1000, int), np.full(1000, 4000), np.ones(1000, bool)
    assert (history.expected(zero, cap, ~yes, many) == 4000).all(), "what nothing can stop runs to the end"
    lengths = np.random.default_rng(0).lognormal(5, 1, 500).astype(int).clip(1, 4000)
    for length in lengths.tolist():
        history.add(length)
    guess = history.expected(zero, cap, yes, many)
    assert abs(guess.mean() / lengths.mean() - 1) < 0.05 and abs(np.median(guess) / np.median(lengths) - 1) < 0.05
    later = history.expected(zero + 300, cap, yes, many)
    assert (later > 300).all() and abs(later.mean() / lengths[lengths > 300].mean() - 1) < 0.1
    assert (history.expected(zero + 3999, cap, yes, many) == 4000).all()


def test_speculation_is_bounded_and_calm_buys_nothing():
    ledger = Ledger(window=1000)
    assert not ledger.allows(gain=10, waste=10, work_ahead=0) and ledger.allows(gain=10, waste=10, work_ahead=100)
    cheap, dear = dict(gain=2, waste=10), dict(gain=4, waste=10)
    assert ledger.allows(**cheap, work_ahead=10_000), "while much is left, little gain is enough"
    ledger.waste = 0.9 * MAX_WASTE * 10_000
    assert not ledger.allows(**dear, work_ahead=10_000) and ledger.allows(gain=5, waste=10, work_ahead=10_000)
    ledger.waste = 0.0
    for _ in range(100_000):
        ledger.add_work(10)
    assert ledger.work <= 1000
