"""The noise is Philox4x32-10 as published, keyed by seed, output index, choice and token id, and by nothing else."""

import math

import numpy as np
import pytest

from tests.sampling import reference
from tests.sampling.rows import ids, logits, row
from worker_svc.sampling import compiled, kernels, philox, plain, sample, score

# kat_vectors of the Random123 distribution, philox4x32 with 10 rounds: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_the_published_vectors_come_out(counter, key, words):
    columns = [np.array([value], np.uint64) for value in counter]
    assert [int(w[0]) for w in philox.philox(columns, philox.round_keys(key[0] | key[1] << 32))] == list(words)
    assert reference.philox(counter, key) == list(words)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_counters_and_words_lie_where_the_contract_says(seed):
    index, choice, vocab_size = 70_000, 3, 4099
    expected = reference.gumbels(seed, index, choice, vocab_size)
    v = philox.complements(philox.round_keys(seed), index, choice, np.arange(vocab_size))
    assert [-math.log(-math.log(1 - x)) for x in v.tolist()] == expected


def test_the_compiled_noise_is_the_plain_noise():
    keys = philox.round_keys(987654321987654321)
    words = compiled.words(keys, 5, 2, 100, 500)
    every = [np.full(500, value, np.uint64) for value in (5, 0, 2, philox.TAG)]
    every[1] = np.arange(100, 600, dtype=np.uint64)
    assert np.array_equal(words, np.stack(philox.philox(every, keys)).astype(np.uint32))
    some = np.array([0, 3, 17, 49_151, 151_935], np.int32)
    assert np.array_equal(compiled.complements(keys, 5, 2, some), philox.complements(keys, 5, 2, some))


@pytest.mark.parametrize("size", [1, 5, 99, 384, 1024, 1025, 5000, 49_152])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1e-4, 1e6])
def test_the_compiled_exponentials_have_the_plain_bits(size, temperature):
    rng = np.random.default_rng(size)
    x = (rng.standard_normal(size) * 5).astype(np.float32)
    x[rng.random(size) < 0.1] = -np.inf
    blocks = -(-size // plain.BLOCK)
    maxima = np.full(blocks, 20, np.float32)
    results = []
    for twin in (plain, compiled):
        e, sums = np.empty((blocks, plain.BLOCK), np.float32), np.empty(blocks, np.float32)
        twin.exp_blocks(x, maxima, temperature, e, sums)
        results.append((e, sums))
    assert np.array_equal(results[0][0], results[1][0]) and np.array_equal(results[0][1], results[1][1])


def test_the_exponential_is_right():
    x = -np.abs(np.random.default_rng(0).standard_normal(100_000) * 20).astype(np.float32)
    x = np.concatenate([x, np.array([0, -87, -88, -1e30, -np.inf], np.float32)])
    exact = np.exp(x.astype(np.float64))
    exact[x < -87] = 0
    assert np.all(np.abs(plain.exp_single(x) - exact) <= 2.4e-7 * exact)


@pytest.mark.parametrize("twin", [plain, compiled])
@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0, 200.0])
def test_the_race_never_loses_the_winner(twin, scale):
    """Whatever the weights, the id with the least E/w is among the candidates, and they are few."""
    rng = np.random.default_rng(3)
    for trial in range(30):
        size = int(rng.integers(1, 5000))
        blocks = -(-size // plain.BLOCK)
        scores = np.full(blocks * plain.BLOCK, -np.inf)
        scores[:size] = rng.standard_normal(size) * scale
        if trial % 3 == 0:
            scores[:size] = np.sort(scores[:size])
        scores -= scores.max()
        e = np.exp(scores).astype(np.float32).reshape(blocks, -1)
        keys = philox.round_keys(trial)
        v = philox.complements(keys, 7, 1, np.arange(len(scores)))
        winner = int(np.argmax(scores - np.log(-np.log1p(-v))))
        found = twin.race(keys, 7, 1, e, np.ones(blocks, np.float32), np.empty(e.size, np.int32))
        assert winner in found.tolist() and len(found) < 200
        ids = np.flatnonzero(e.ravel() > 0).astype(np.int32)
        places = twin.race_ids(keys, 7, 1, ids, e.ravel()[ids], np.empty(e.size, np.int32))
        assert winner in ids[places].tolist()


def test_the_compiled_loops_are_the_ones_in_use():
    assert kernels.race is compiled.race and kernels.exp_blocks is compiled.exp_blocks


def test_warming_up_leaves_nothing_to_compile():
    """The first step of a service must not wait for a compiler."""
    kernels.warm_up()
    loops = (compiled._exp_blocks, compiled._race, compiled._race_ids, compiled._complements)
    before = [len(loop.signatures) for loop in loops]
    table = logits(3, 3000)
    frozen = table.numpy().copy()
    frozen.flags.writeable = False
    for given in (table, frozen):
        sample(given, [row(logprobs=2), row(top_p=0.9, seed=2**64 - 1), row(top_k=5, presence_penalty=0.5)])
        sample(given, [row(temperature=5.0, min_p=1e-9), row(top_k=2900), row(bad_ids=ids(3), logprobs=0)])
        score(given, ids(1, 2, 3), 2)
    assert [len(loop.signatures) for loop in loops] == before
