"""A row's logits keep every bit, whatever is beside it, however it is cut, on however many ranks and threads."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny_models import FAMILIES
from tests.worker import jobs
from tests.worker.driver import DrivenRow, Driver
from tests.worker.mutants import MUTANTS
from tests.worker.rank_pool import RankPool
from worker_svc.models import load_model

DTYPES = ("float32", "bfloat16")
CHUNKINGS = ((1,) * 20, (3,) * 30, (16,) * 16, (64,) * 4, (255, 1, 1), (257, 1), (31, 200, 1))


def tokens(length: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(385) for _ in range(length)]


def bits(x: np.ndarray | torch.Tensor) -> bytes:
    return np.ascontiguousarray(x).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_chunking_gives_the_same_bits(family: str, dtype: str, tiny: Callable[..., Path]) -> None:
    driver = Driver(load_model(tiny(family), dtype=dtype))
    prompt = tokens(300)
    whole = bits(driver.logits(prompt))
    for chunks in CHUNKINGS:
        assert bits(driver.logits(prompt, chunks)) == whole, chunks


@pytest.mark.slow
def test_every_position_decoded_alone_gives_the_same_bits(tiny: Callable[..., Path]) -> None:
    driver = Driver(load_model(tiny(), dtype="float32"))
    prompt = tokens(520)
    assert bits(driver.logits(prompt, (1,) * 519)) == bits(driver.logits(prompt))


@pytest.mark.parametrize("window", (20, 256, 300))
def test_a_window_gives_the_same_bits_for_any_chunking(window: int, tiny: Callable[..., Path]) -> None:
    driver = Driver(load_model(tiny("mistral", sliding_window=window), dtype="float32"))
    prompt = tokens(400)
    whole = bits(driver.logits(prompt))
    for chunks in ((1,) * 30, (270, 1, 1), (300, 50)):
        assert bits(driver.logits(prompt, chunks)) == whole, chunks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("others", (1, 3, 7, 31))
def test_neighbours_change_no_bit(others: int, dtype: str, tiny: Callable[..., Path]) -> None:
    """The row decodes beside rows that prefill and decode at random; its steps have the bits of the row alone."""
    driver = Driver(load_model(tiny(), dtype=dtype), num_blocks=1024)
    mine = tokens(290)
    alone = driver.logits(mine)
    draw = random.Random(others)
    row = DrivenRow(mine)
    crowd = [DrivenRow(tokens(draw.randrange(1, 400), seed=i)) for i in range(others)]
    for step in range(12):
        place = draw.randrange(others + 1)
        beside = [r for r in crowd if r.computed < len(r.tokens) and draw.random() < 0.8]
        rows = [*beside[:place], row, *beside[place:]]
        ask = 270 if step == 0 else draw.choice((1, 1, 2))
        new = [min(ask if r is row else draw.choice((1, 5, 64)), len(r.tokens) - r.computed) for r in rows]
        begin = row.computed
        hidden = driver.step(rows, new)
        at = sum(new[: rows.index(row)])
        got = driver.model.logits(hidden, driver.group)[at : at + row.computed - begin]
        assert bits(got) == bits(alone[begin : row.computed]), (step, new)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_change_no_bit(family: str, dtype: str, tiny: Callable[..., Path], ranks: RankPool) -> None:
    window = {"sliding_window": 100} if family in ("mistral", "mixtral") else {}
    folder = str(tiny(family, vocab_size=2100, **window))
    prompt = tokens(300)
    (alone,) = ranks.run(1, jobs.logits, folder, dtype, prompt)
    for tp in (2, 4):
        for got in ranks.run(tp, jobs.logits, folder, dtype, prompt, chunks=(100, 1, 1, 150)):
            assert bits(got) == bits(alone), tp


@pytest.mark.parametrize("dtype", DTYPES)
def test_three_ranks_change_no_bit(dtype: str, tiny: Callable[..., Path], ranks: RankPool) -> None:
    """SmolLM2's kind of shape: 9 heads, 3 kv heads, 3 leaves."""
    folder = str(tiny("llama", hidden_size=72, num_attention_heads=9, num_key_value_heads=3, intermediate_size=192))
    prompt = tokens(80)
    (alone,) = ranks.run(1, jobs.logits, folder, dtype, prompt)
    for got in ranks.run(3, jobs.logits, folder, dtype, prompt):
        assert bits(got) == bits(alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype: str, tiny: Callable[..., Path], ranks: RankPool) -> None:
    folder = str(tiny("llama", hidden_size=128, intermediate_size=512))
    prompt = tokens(300)
    (one,) = ranks.run(1, jobs.logits, folder, dtype, prompt, threads=1)
    (two,) = ranks.run(1, jobs.logits, folder, dtype, prompt, threads=2, chunks=(200, 1))
    assert bits(one) == bits(two)


@pytest.mark.parametrize("block_size", (1, 8, 24, 32, 512))
def test_block_sizes_change_no_bit(block_size: int, tiny: Callable[..., Path], ranks: RankPool) -> None:
    folder, prompt = str(tiny()), tokens(300)
    (usual,) = ranks.run(1, jobs.logits, folder, "float32", prompt)
    (other,) = ranks.run(1, jobs.logits, folder, "float32", prompt, block_size=block_size, chunks=(280, 1))
    assert bits(usual) == bits(other)


def test_what_an_earlier_owner_left_reaches_nobody(tiny: Callable[..., Path]) -> None:
    """Blocks full of NaN are handed out; every row reads zeros where it has not written."""
    driver = Driver(load_model(tiny(), dtype="float32"))
    prompt = tokens(70)
    clean = bits(driver.logits(prompt))
    for layer in driver.cache.layers:
        layer.keys[: driver.cache.null_block] = float("nan")
        layer.values[: driver.cache.null_block] = float("nan")
    assert bits(driver.logits(prompt, (20, 1, 30))) == clean


def test_a_shared_block_is_read_and_not_written(tiny: Callable[..., Path]) -> None:
    """A row that recomputes a cached prefix for its scores leaves the shared blocks alone."""
    driver = Driver(load_model(tiny(), dtype="float32"))
    prompt = tokens(50)
    first = DrivenRow(prompt)
    hidden = driver.step([first], [50])
    kept = driver.cache.layers[1].keys.clone()
    again = DrivenRow(prompt, blocks=first.blocks[:3], num_cached=48)
    parts = [driver.step([again], [20]), driver.step([again], [30])]
    assert bits(torch.cat(parts)) == bits(hidden)
    assert bits(driver.cache.layers[1].keys[first.blocks]) == bits(kept[first.blocks])


@pytest.mark.parametrize("mutant", ("rows_decide_the_path", "chunk_aligned_splits"))
def test_a_fault_in_the_order_shows_across_chunkings(mutant: str, tiny: Callable[..., Path]) -> None:
    with MUTANTS[mutant]():
        driver = Driver(load_model(tiny(), dtype="float32"))
        prompt = tokens(300)
        assert bits(driver.logits(prompt)) != bits(driver.logits(prompt, (299, 1)))


def test_a_fault_in_the_order_of_experts_shows(tiny: Callable[..., Path]) -> None:
    with MUTANTS["experts_in_order_of_arrival"]():
        driver = Driver(load_model(tiny("qwen3_moe", num_experts_per_tok=3), dtype="float32"))
        prompt = tokens(60)
        assert bits(driver.logits(prompt)) != bits(driver.logits(prompt, (31,)))


def test_a_fault_in_the_order_shows_across_ranks(tiny: Callable[..., Path], ranks: RankPool) -> None:
    """gloo's own all-reduce, on 4 ranks: two addends would have one order."""
    folder, prompt = str(tiny()), tokens(300)
    (alone,) = ranks.run(1, jobs.logits, folder, "float32", prompt)
    broken = ranks.run(4, jobs.logits, folder, "float32", prompt, mutant="library_reduce")
    assert any(bits(got) != bits(alone) for got in broken)
