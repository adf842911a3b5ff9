"""Prompts are computed once: by n choices, by requests that arrive together, and by those that come later."""

import numpy as np
import pytest

from scheduler_svc.core.prefix_cache import extend_chain, root_digest
from tests.core.engine import Bench

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def prompts_computed(bench: Bench) -> int:
    return bench.core.stats().counters.scheduled_prompt_tokens


@DEPTHS
@pytest.mark.parametrize("as_one_request", [True, False])
def test_sixteen_groups_of_sixteen_compute_each_prompt_once_and_its_last_token_for_each_follower(depth, as_one_request):
    bench = Bench(
        num_blocks=4096,
        block_size=16,
        max_num_seqs=256,
        max_batch_tokens=2048,
        max_seq_len=2048,
        pipeline_depth=depth,
        check=False,
    )
    for group in range(16):
        prompt = np.random.default_rng(group).integers(0, 97, 1024).astype(np.int32)
        if as_one_request:
            bench.submit(prompt, max_tokens=4, n=16, seed=group)
        else:
            for member in range(16):
                bench.submit(prompt, max_tokens=4, seed=1000 * group + member)
    bench.run()
    assert prompts_computed(bench) == 16 * (1024 + 15)
    bench.assert_solo()


@DEPTHS
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 8, 21, 64])
def test_choices_of_one_prompt_get_what_they_get_alone(depth, num_prompt):
    bench = Bench(pipeline_depth=depth)
    key = bench.submit(num_prompt, max_tokens=9, n=5)
    bench.run()
    bench.assert_solo()
    full = num_prompt // 4 * 4
    assert prompts_computed(bench) == num_prompt + 4 * (num_prompt - min(full, num_prompt - 1))
    assert bench.output(key, 0) != bench.output(key, 1)


def test_a_later_request_finds_a_finished_ones_blocks_and_its_output():
    bench = Bench()
    first = bench.submit(10, max_tokens=7)
    bench.run()
    prompt = [*bench.requests[first].prompt.tolist(), *bench.output(first)]
    again = bench.submit(prompt[:13], max_tokens=3)
    bench.run()
    bench.assert_solo()
    (finished,) = bench.told[again, 0].finished
    assert finished.cached_tokens == 12


def test_a_hit_of_the_whole_prompt_computes_its_last_token_again_and_writes_nothing():
    bench = Bench()
    key = bench.submit(8, max_tokens=3)
    bench.run()
    cells = bench.fake.cache.copy()
    request = bench.requests[key]
    bench.fake.keep_batches = True
    again = bench.submit(request.prompt, max_tokens=1, seed=request.seed)
    bench.run()
    (finished,) = bench.told[again, 0].finished
    assert finished.cached_tokens == 7 and bench.output(again) == bench.output(key)[:1]
    (row,) = bench.fake.batches[0].rows
    assert (row.num_computed, row.num_cached) == (7, 8)
    assert (bench.fake.cache == cells).all()


def test_salts_weights_and_the_switch_keep_prefixes_apart():
    bench = Bench()
    prompt = list(range(12))
    for salt in ("a", "b", "a"):
        bench.submit(prompt, max_tokens=1, cache_salt=salt)
        bench.run()
    assert [bench.told[key, 0].finished[0].cached_tokens for key in (1, 2, 3)] == [0, 0, 11]
    off = Bench(prefix_cache=False)
    for _ in range(2):
        off.submit(prompt, max_tokens=1)
        off.run()
    assert off.told[2, 0].finished[0].cached_tokens == 0 and prompts_computed(off) == 24
    assert len({root_digest("m", "ab"), root_digest("ma", "b"), root_digest("", "mab"), root_digest("mab", "")}) == 4
    chains = [[], [], []]
    for chain, root, tokens in zip(chains, ("x", "x", "y"), ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4])):
        extend_chain(chain, root_digest(root, ""), np.array(tokens, np.int32), 2, 2)
    assert chains[0][0] == chains[1][0] != chains[2][0] and chains[0][1] != chains[1][1]


def test_blocks_are_evicted_last_used_first_and_ends_of_prefixes_before_their_beginnings():
    bench = Bench(num_blocks=8)
    old, new = list(range(12)), list(range(50, 62))
    for prompt in (old, new):
        bench.submit(prompt, max_tokens=1)
        bench.run()
    bench.submit(list(range(70, 82)), max_tokens=1)  # needs one block more than is free: the end of the old prompt
    bench.run()
    cached = []
    for prompt in (old, new):
        cached.append(len(bench.core._residency.index.match(chain_of(bench, prompt), 3)))
    assert cached == [2, 3]


def chain_of(bench: Bench, prompt: list[int]) -> list[bytes]:
    chain: list[bytes] = []
    root = root_digest(bench.config.model_version, "")
    extend_chain(
        chain, root, np.array(prompt, np.int32), bench.config.block_size, len(prompt) // bench.config.block_size
    )
    return chain


@DEPTHS
def test_followers_lead_when_their_leader_goes(depth):
    bench = Bench(max_batch_tokens=8, pipeline_depth=depth)
    prompt = list(range(40))
    keys = [bench.submit(prompt, max_tokens=4, seed=seed) for seed in range(3)]
    bench.step()
    bench.step()
    assert bench.core.stats().waiting_for == {"leader": 2}
    bench.cancel(keys[0])
    bench.run()
    bench.assert_solo(*keys[1:])
    assert prompts_computed(bench) <= 2 * 40 + 4, "what the first one computed is found, the rest computed once"


@DEPTHS
@pytest.mark.parametrize("num_prompt", [1, 2, 15, 16, 17, 31, 32, 33])
def test_prompt_scores_do_not_depend_on_cache_or_chunks(depth, num_prompt):
    told = []
    for options in ({}, {"prefix_cache": False}, {"max_batch_tokens": 5}, {"num_blocks": 3, "max_num_seqs": 1}):
        bench = Bench(**{"block_size": 16, "pipeline_depth": depth, **options})
        prompt = np.arange(num_prompt)
        warm = bench.submit(prompt, max_tokens=2)
        bench.run()
        keys = [bench.submit(prompt, max_tokens=t, prompt_logprobs=1, n=n) for t, n in ((2, 1), (0, 1), (3, 2))]
        bench.run()
        bench.assert_solo(warm, *keys)
        told += [bench.told[key, 0].scores for key in keys]
    assert len(told[0]) == num_prompt - 1
    assert all(scores == told[0] for scores in told)


def test_scoring_skips_no_computation_and_adds_none():
    bench = Bench()
    for _ in range(2):
        bench.submit(np.arange(20), max_tokens=0, prompt_logprobs=0)
        bench.run()
    assert prompts_computed(bench) == 2 * 19
    assert bench.told[2, 0].finished[0].completion_tokens == 0
