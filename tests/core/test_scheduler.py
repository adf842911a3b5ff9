"""The core's promises on small numbers, against what each request gets alone."""

import pytest

from scheduler_svc.core.request import Draining, Duplicate, NeverFits, Overloaded
from tests.core.engine import Bench

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


@DEPTHS
def test_batched_requests_get_what_they_get_alone(depth):
    bench = Bench(pipeline_depth=depth)
    for prompt in (1, 3, 4, 5, 17, 40):
        bench.submit(prompt, max_tokens=11)
    bench.run()
    bench.assert_solo()


@DEPTHS
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("blocks", [20, 24, 31, 40])
def test_preemption_changes_nothing(depth, cache, blocks):
    bench = Bench(num_blocks=blocks, pipeline_depth=depth, prefix_cache=cache)
    for _ in range(8):
        bench.submit(20, max_tokens=60)
    bench.run()
    bench.assert_solo()


def test_sampling_at_the_scheduler_gives_the_same_tokens():
    bench = Bench(num_blocks=20, sample_at_scheduler=True)
    for _ in range(8):
        bench.submit(9, max_tokens=30, eos_ids=frozenset({5}))
    bench.run()
    bench.assert_solo()


@DEPTHS
def test_stop_ids_end_a_choice_after_min_tokens(depth):
    bench = Bench(pipeline_depth=depth)
    for n in range(30):
        bench.submit(5, max_tokens=40, eos_ids=frozenset(range(20)), min_tokens=n, stop_token_ids=frozenset({50, 51}))
    bench.run()
    bench.assert_solo()


def test_refusals_leave_nothing():
    bench = Bench(num_blocks=4, block_size=4, max_seq_len=64, max_queue=2, max_num_seqs=1)
    with pytest.raises(NeverFits, match=r"need 5 KV blocks.*there are 4"):
        bench.submit(10, max_tokens=8)
    with pytest.raises(NeverFits, match="65 tokens; the context holds 64"):
        bench.submit(60, max_tokens=5)
    bench.submit(10, max_tokens=7, request_id="x")
    with pytest.raises(Duplicate):
        bench.submit(1, request_id="x")
    bench.submit(1)
    bench.submit(1)
    with pytest.raises(Overloaded) as refusal:
        bench.submit(1)
    assert 0 < refusal.value.retry_after_s <= 60
    bench.core.drain()
    with pytest.raises(Draining):
        bench.submit(1)
    bench.run()
    bench.assert_solo()
