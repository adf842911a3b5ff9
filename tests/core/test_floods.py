"""Many requests, small pools: floods, random cancels, shared prefixes. Nothing is lost and no answer differs."""

from collections import Counter

import numpy as np
import pytest

from protos import codec
from scheduler_svc.core import batching
from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.request import Overloaded
from tests.core.engine import Bench
from tests.core.fake import solo


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_two_hundred_cancels_at_random_moments_give_every_block_back_within_two_steps(depth, cached):
    """In the queue, in any chunk, before the first token, in the middle, after the last; the neighbour goes on."""
    rng = np.random.default_rng(depth)
    bench = Bench(pipeline_depth=depth, prefix_cache=cached, max_batch_tokens=16, max_num_seqs=3, num_blocks=120)
    shared = rng.integers(0, 97, 30).tolist()
    neighbour = bench.submit(shared, max_tokens=300)
    for _ in range(4):
        bench.step()
    moments = Counter()
    for at in range(200):
        keys = [
            bench.submit([*shared[: int(rng.integers(1, 31))], *rng.integers(0, 97, 12)], max_tokens=4, n=n)
            for n in rng.integers(1, 3, int(rng.integers(1, 4))).tolist()
        ]
        for _ in range(int(rng.integers(0, 9))):
            bench.step()
        for key in keys:
            told = bench.told[key, 0]
            moments["ended" if told.finished else "running" if told.tokens else "not begun"] += 1
            bench.cancel(key)
        for _ in range(max(2, depth)):
            bench.step()
        stats = bench.core.stats()
        alive = int(not bench.told[neighbour, 0].finished)
        assert (stats.running, stats.waiting) == (alive, 0), f"after {at} rounds"
        if not alive:
            assert stats.blocks_free + stats.blocks_cached == 120 and stats.blocks_held == 0
            assert cached or stats.blocks_free == 120
            neighbour = bench.submit(shared, max_tokens=300)
            bench.step()
    assert min(moments[kind] for kind in ("ended", "running", "not begun")) >= 20, moments
    bench.run()
    for (key, choice), told in bench.told.items():
        expected = solo(bench.requests[key], choice)[0]
        assert len(told.finished) == 1 and told.tokens == expected[: len(told.tokens)]


def test_ten_thousand_requests_at_once_are_answered_or_refused_at_once_and_end_once():
    bench = Bench(
        num_blocks=600,
        block_size=16,
        max_num_seqs=8,
        max_batch_tokens=512,
        max_seq_len=1100,
        max_queue=100,
        check=False,
    )
    accepted, refused, prompt = [], [], np.arange(1000) % 97
    for at in range(10_000):
        try:
            accepted.append(bench.submit(np.roll(prompt, at), max_tokens=3, n=1 + at % 3))
        except Overloaded as overload:
            refused.append(overload.retry_after_s)
    choices = sum(bench.requests[key].n for key in accepted)
    assert 106 <= choices <= 108 and len(refused) == 10_000 - len(accepted)
    assert all(0 < hint <= 60 for hint in refused)
    bench.run()
    bench.core.check_invariants()
    bench.assert_solo()
    counters = bench.core.stats().counters
    assert (counters.accepted, counters.refused) == (len(accepted), len(refused))
    assert counters.finished == {"length": choices}


POOLS = [(12, 16), (12, 4), (9, 16), (40, 1), (16, 7)]


def fuzz_prefixes(num_blocks, block_size, depth, forecast, count, check=True):
    """Requests that share beginnings of one to four blocks, six at once, some cancelled."""
    rng = np.random.default_rng(num_blocks * 31 + block_size + depth)
    bench = Bench(
        num_blocks=num_blocks,
        block_size=block_size,
        pipeline_depth=depth,
        forecast=forecast,
        max_batch_tokens=64,
        max_num_seqs=6,
        check=check,
    )
    room = num_blocks * block_size
    families = rng.integers(0, 97, (3, 4 * block_size))
    live, cancelled = [], set()
    while len(bench.told) < count or live:
        while len(live) < 6 and len(bench.told) < count:
            family = families[int(rng.integers(3))]
            prompt = [*family[: block_size * int(rng.integers(1, 5))], *rng.integers(0, 97, int(rng.integers(0, 9)))]
            prompt = prompt[: room // 2]
            live.append(bench.submit(prompt, max_tokens=int(rng.integers(1, min(41, room - len(prompt))))))
        bench.step()
        if rng.random() < 0.05:
            cancelled.add(key := live[int(rng.integers(len(live)))])
            bench.cancel(key)
        live = [key for key in live if not bench.told[key, 0].finished]
    bench.run()
    for key in bench.requests:
        expected = solo(bench.requests[key])[0]
        got = bench.told[key, 0].tokens
        assert got == expected or (key in cancelled and got == expected[: len(got)]), f"request {key}"
    references = bench.core._residency.pool.references
    assert not references.any()
    return bench


@pytest.mark.parametrize("forecast", [True, False])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(("num_blocks", "block_size"), POOLS)
def test_prefixes_shared_in_a_tiny_pool_are_read_as_they_were_written(num_blocks, block_size, depth, forecast):
    """The fake reads every cell of a row's context at every token, so a block evicted or reused too early shows."""
    count = 500 if (num_blocks, block_size, depth) == (12, 16, 1) else 120
    bench = fuzz_prefixes(num_blocks, block_size, depth, forecast, count)
    counters = bench.core.stats().counters
    assert counters.prefix_hits > 0 and bench.core._residency.pool.num_evicted > 0
    assert forecast or counters.preemptions > 0


def test_a_pool_that_gives_away_blocks_in_use_is_caught(monkeypatch):
    real = BlockPool.release

    def release(self, blocks):
        """The first block of a table comes free although another table holds it."""
        shared = blocks[self.references[blocks] > 1][:1]
        self.references[shared] = 1
        real(self, blocks)

    monkeypatch.setattr(BlockPool, "release", release)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        fuzz_prefixes(12, 16, 1, True, 120, check=False)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("lengths", [(33, 20), (17, 32), (48, 47), (16, 15)])
def test_scores_of_overlapping_prompts_do_not_depend_on_who_came_first(lengths, depth):
    """Prompts that share a beginning, with and without scores, in both orders and at once."""
    base = np.random.default_rng(4).integers(0, 97, 60)
    prompts = [base[: lengths[0]], np.concatenate((base[: lengths[1]], [96, 5, 4]))]

    def scores(order, at_once, cached):
        bench = Bench(block_size=16, pipeline_depth=depth, prefix_cache=cached)
        keys = {}
        for which in order:
            keys[which] = bench.submit(prompts[which], max_tokens=3, prompt_logprobs=1)
            bench.submit(prompts[which], max_tokens=3)
            if not at_once:
                bench.run()
        bench.run()
        bench.assert_solo()
        return [bench.told[keys[which], 0].scores for which in (0, 1)]

    expected = scores((0, 1), at_once=False, cached=False)
    assert [len(found) for found in expected] == [len(prompt) - 1 for prompt in prompts]
    for order in ((0, 1), (1, 0)):
        for at_once in (False, True):
            assert scores(order, at_once, cached=True) == expected


# What one step may introduce


def introduced_bytes(bench):
    """Of each step that introduces more than one row."""
    return [
        sum(4 * (len(row.token_ids) + len(row.block_ids)) for row in batch.rows)
        for batch in bench.fake.batches
        if len(batch.rows) > 1
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_followers_of_a_long_prompt_come_in_steps_of_bounded_size(monkeypatch, depth):
    monkeypatch.setattr(batching, "MAX_INTRODUCED_BYTES", 5000)
    bench = Bench(num_blocks=500, max_num_seqs=16, max_batch_tokens=256, pipeline_depth=depth)
    bench.fake.keep_batches = True
    bench.submit(300, max_tokens=5, n=16)
    bench.submit(1300, max_tokens=2)  # larger than the bound, alone
    bench.run()
    bench.assert_solo()
    found = introduced_bytes(bench)
    assert 4 <= len(found) and max(found) <= 5000
    assert max(len(batch.rows) for batch in bench.fake.batches) == 3


@pytest.mark.timeout(120)
def test_no_step_of_a_hundred_and_eighty_long_rows_is_larger_than_a_message_may_be():
    """All of them at once would be 77 MB, since each finds its prompt in the cache and computes one token."""
    bench = Bench(
        num_blocks=7000, block_size=16, max_num_seqs=180, max_batch_tokens=8192, max_seq_len=100_100, max_queue=200,
        check=False, strict=False,
    )  # fmt: skip
    bench.fake.keep_batches = True
    bench.submit(100_000, max_tokens=2, n=180)
    sizes, steps = [], 0
    while bench.step():
        steps += 1
        for batch in bench.fake.batches:
            sizes.append(codec.encode_batch(batch).ByteSize())
        bench.fake.batches.clear()
    assert 10 << 20 < max(sizes) < codec.MAX_MESSAGE_BYTES // 2 and sum(sizes) > codec.MAX_MESSAGE_BYTES
    assert steps < 30
    bench.assert_idle()


def test_a_core_without_that_bound_is_caught(monkeypatch):
    monkeypatch.setattr(batching, "introduction_bytes", lambda sequence, block_size: 0)
    with pytest.raises(AssertionError):
        test_followers_of_a_long_prompt_come_in_steps_of_bounded_size(monkeypatch, 1)
