"""Same request, same bits: the whole engine without its wires, and the ways in which it could go wrong.

`bench/invariance.py` asks the same of the services; here parts of the engine are broken on purpose, which must show.
"""

import numpy as np
import pytest

from tests.sampling.small_engine import SmallEngine, alone, count_differing, draw_requests, threads
from tests.tiny_models import make_tiny
from worker_svc import cpu_runner, drawing
from worker_svc.attention import paged, work
from worker_svc.ops import cpu
from worker_svc.sampling import SamplerRow

COUNT = 14


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny") / "llama", "llama", num_hidden_layers=2)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def case(folder, dtype):
    """Engine, requests, and what each was told alone."""
    engine = SmallEngine(folder, dtype=dtype)
    requests = draw_requests(COUNT, engine.vocab_size)
    told = alone(engine, requests)
    assert sum(map(len, told.values())) > 100
    return engine, requests, told


CROWDS = {
    "at once": {},
    "one by one": {"stagger": 2},
    "chunks of 3": {"max_batch_tokens": 3, "max_num_seqs": 3},
    "chunks of 16": {"max_batch_tokens": 16, "stagger": 1},
    "chunks of 64": {"max_batch_tokens": 64},
    "a pool that is always full": {"num_blocks": 84, "block_size": 4, "forecast": False},
    "small blocks": {"block_size": 4},
    "large blocks": {"block_size": 64, "num_blocks": 64},
    "workers lost every seventh step": {"lose_every": 7, "stagger": 1, "depth": 2},
    "no prefix cache": {"prefix_cache": False},
    "two steps in flight": {"depth": 2},
    "four steps in flight, a full pool, chunks": {
        "depth": 4,
        "num_blocks": 24,
        "max_batch_tokens": 40,
        "stagger": 1,
        "forecast": False,
    },
}


@pytest.mark.parametrize("crowd", CROWDS.values(), ids=CROWDS)
def test_a_crowd_changes_nothing(case, crowd):
    engine, requests, told = case
    assert count_differing(told, engine.run(requests, **crowd)) == 0
    if "forecast" in crowd:
        assert engine.preemptions > 0


def test_the_order_of_submission_changes_nothing(case):
    engine, requests, told = case
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(len(requests))
        assert count_differing(told, engine.run([requests[i] for i in order], stagger=seed)) == 0


@pytest.mark.parametrize("tp", [2, 4])
def test_the_number_of_shards_changes_nothing(folder, dtype, case, tp):
    _, requests, told = case
    engine = SmallEngine(folder, tp, dtype)
    assert count_differing(told, engine.run(requests, max_batch_tokens=100)) == 0
    assert count_differing({n: told[n] for n in told if n[0] == 3}, engine.run([requests[3]])) == 0


def test_the_number_of_threads_changes_nothing(folder, dtype, case):
    _, requests, told = case
    with threads(2):
        from worker_svc.ops.invariance import probe

        probe.cache_clear()  # a worker with two threads asks its own questions
        engine = SmallEngine(folder, dtype=dtype)
        probe.cache_clear()
        assert count_differing(told, engine.run(requests, stagger=1)) == 0


# The six mutants, each a way in which real engines fail.


def split_by_batch_size(set_, engine):
    """Keys are cut more finely when few rows leave cores idle."""
    original = cpu.passes

    def passes(host, **options):
        size = 256 if len(host.num_new) > 4 else 64
        set_(work, "SPLIT", size)
        set_(paged, "SPLIT", size)
        return original(host, **options)

    set_(cpu, "passes", passes)


def reduction_order_that_depends_on_rows(set_, engine):
    """Two halves of K when there are many rows, one piece when there are few, as a library that picks a kernel does."""
    original = cpu.matmul

    def matmul(x, weight):
        if len(x) <= 8:
            return original(x, weight)
        first, second = x.clone(), x.clone()
        half = x.shape[1] // 2
        first[:, half:], second[:, :half] = 0, 0
        return original(first, weight) + original(second, weight)

    set_(cpu, "matmul", matmul)


def splits_aligned_with_the_chunk(set_, engine):
    """Key splits are as long as the step's longest chunk, up to 256."""
    original = cpu.passes

    def passes(host, **options):
        size = 64 if host.num_new.max() < 64 else 256
        set_(work, "SPLIT", size)
        set_(paged, "SPLIT", size)
        return original(host, **options)

    set_(cpu, "passes", passes)


def all_reduce_in_the_librarys_order(set_, engine):
    """A ring: who adds first depends on where in the message an element lies, so on the message's size."""

    def fold_across(leaves, part, group):
        mine = leaves[0]
        for leaf in leaves[1:]:
            mine = mine + leaf
        every = group.all_gather(mine)
        first = mine.numel() // 64 % group.tp
        total = every[first]
        for step in range(1, group.tp):
            total = total + every[(first + step) % group.tp]
        return total

    set_(cpu, "fold_across", fold_across)


def noise_keyed_by_row(set_, engine):
    original = drawing.sample

    def sample(logits, rows):
        choices = [row.choice for row in rows]
        for place, row in enumerate(rows):
            row.choice = place
        drawn = original(logits, rows)
        for row, choice in zip(rows, choices):
            row.choice = choice
        return drawn

    set_(drawing, "sample", sample)


def largest_top_k_of_the_batch(set_, engine):
    original = drawing.sample

    def sample(logits, rows):
        limits = [row.top_k for row in rows]
        for row in rows:
            row.top_k = max(limits)
        drawn = original(logits, rows)
        for row, limit in zip(rows, limits):
            row.top_k = limit
        return drawn

    set_(drawing, "sample", sample)


def forgotten_output_at_preemption(set_, engine):
    class Forgetful(SamplerRow):
        def __init__(self, row):
            super().__init__(row)
            self.num_output = 0

    set_(cpu_runner, "SamplerRow", Forgetful)


MUTANTS = [
    (split_by_batch_size, 1, {}),
    (reduction_order_that_depends_on_rows, 1, {}),
    (splits_aligned_with_the_chunk, 1, {"max_batch_tokens": 40}),
    (all_reduce_in_the_librarys_order, 4, {}),
    (noise_keyed_by_row, 1, {}),
    (largest_top_k_of_the_batch, 1, {}),
    (forgotten_output_at_preemption, 1, {"num_blocks": 84, "block_size": 4, "forecast": False}),
]


@pytest.fixture(scope="module")
def engines(folder):
    return {tp: SmallEngine(folder, tp, plain=True) for tp in (1, 4)}


@pytest.mark.parametrize(("mutant", "tp", "crowd"), MUTANTS, ids=[mutant.__name__ for mutant, _, _ in MUTANTS])
def test_mutant_dies_and_its_control_lives(engines, monkeypatch, mutant, tp, crowd):
    """Both runs of a mutant are mutated: it must contradict itself, not merely differ from the right engine."""
    engine = engines[tp]
    requests = draw_requests(12 if tp > 1 else COUNT, engine.vocab_size)
    few = requests if tp > 1 else requests[:3]  # one engine without a fault is asked much more above
    assert count_differing(alone(engine, few), engine.run(few, **crowd)) == 0
    mutant(monkeypatch.setattr, engine)
    assert count_differing(alone(engine, requests), engine.run(requests, **crowd)) > 0
