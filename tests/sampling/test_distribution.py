"""What may be drawn and how often, against the rules worked out once more in double precision (`reference.py`)."""

import itertools
import math

import numpy as np
import pytest
import torch

from protos.step import RowSampling
from tests.sampling import reference
from tests.sampling.rows import floats, ids, logits, row
from worker_svc.sampling import SamplerRow, sample
from worker_svc.sampling.selection import select

V = 67
PROMPT, OUTPUT = [1, 2, 3, 3, 9], [4, 4, 5, 9, 4]
SETTINGS = {
    "temperature": [0.0, 0.6, 1.0, 2.5],
    "top_k": [0, 1, 7, V + 5],
    "top_p": [1.0, 0.85, 0.3],
    "min_p": [0.0, 0.05, 1.0],
    "penalties": [
        {},
        {"presence_penalty": 0.7, "frequency_penalty": 0.3},
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.7, "presence_penalty": -0.5, "frequency_penalty": 0.2},
    ],
    "bias": [{}, {"bias_ids": ids(4, 20, 66), "bias_values": floats(3.0, -5.0, 2.5)}],
    "masks": [
        {},
        {"allowed_ids": ids(0, 4, 9, 20, 30, 31, 32, 66)},
        {"bad_ids": ids(5, 66), "stop_ids": ids(9, 11), "min_tokens": 6},
        {"stop_ids": ids(9, 11), "min_tokens": 5},  # reached: masks nothing
    ],
}


def every_setting():
    for values in itertools.product(*SETTINGS.values()):
        plain = dict(zip(list(SETTINGS)[:4], values[:4]))
        yield plain | values[4] | values[5] | values[6]


def drawable(table: torch.Tensor, sampler_row: SamplerRow) -> np.ndarray:
    """The product's own distribution over the vocabulary [V]."""
    z = sampler_row.process(table.numpy())
    result = np.zeros(len(z))
    if sampler_row.greedy:
        result[z.argmax()] = 1
        return result
    kept = select(z, float(z.max()), sampler_row.temperature, sampler_row.top_k, sampler_row.top_p, sampler_row.min_p)
    scores = (z.astype(np.float64) - z.max()) / sampler_row.temperature
    if kept is not None:
        result[kept.ids] = np.exp(kept.scores) / np.exp(kept.scores).sum()
    else:
        result = np.exp(scores) / np.exp(scores).sum()
    return result


def check_distribution(settings: dict, table: torch.Tensor, seed: int) -> None:
    sampling = RowSampling(**settings)
    expected = reference.distribution(table.double().numpy(), sampling, PROMPT, OUTPUT)
    sampler_row = row(PROMPT, OUTPUT, seed, 2, **settings)
    got = drawable(table, sampler_row)
    assert np.array_equal(got > 0, expected > 0), settings
    assert np.abs(got - expected).max() < 1e-6, settings
    drawn = sample(table[None], [sampler_row])
    assert drawn.token_ids[0] == reference.draw(expected, seed, len(OUTPUT), 2), settings


def check_logprobs(settings: dict, table: torch.Tensor, raw: bool, k: int) -> None:
    drawn = sample(table[None], [row(PROMPT, OUTPUT, 5, **settings, logprobs=k, raw_logprobs=raw)])
    temperature = settings["temperature"] if settings["temperature"] > 1e-5 and not raw else 1.0
    expected = reference.log_softmax(table.double().numpy(), temperature)
    assert drawn.logprobs[0] == pytest.approx(expected[drawn.token_ids[0]], abs=2e-6, rel=1e-6)
    order = sorted(range(len(table)), key=lambda token: (-float(table[token]), token))[:k]
    assert drawn.alternative_ids.tolist() == order
    assert np.allclose(drawn.alternative_logprobs, expected[order], atol=2e-6, rtol=1e-6)
    for token, value in zip(order, drawn.alternative_logprobs):
        if token == drawn.token_ids[0]:
            assert value == drawn.logprobs[0]


@pytest.mark.parametrize("temperature", SETTINGS["temperature"])
def test_every_combination_of_settings_has_the_reference_distribution(temperature):
    tables = logits(8, V)
    for n, settings in enumerate(every_setting()):
        if settings["temperature"] == temperature:
            check_distribution(settings, tables[n % 8], n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [384, 3000])
def test_larger_vocabularies_have_the_reference_distribution(size, dtype):
    rng = np.random.default_rng(size)
    tables = logits(4, size, dtype=dtype)
    for n in range(12):
        settings = {
            "temperature": float(rng.choice([0.3, 1.0, 4.0])),
            "top_k": int(rng.choice([0, 20, 600, size])),
            "top_p": float(rng.choice([1.0, 0.95, 0.5])),
            "min_p": float(rng.choice([0.0, 0.01])),
            "presence_penalty": float(rng.choice([0.0, 1.0])),
        }
        check_distribution(settings, tables[n % 4], n)


def test_ties_go_to_the_lower_id_everywhere():
    table = torch.zeros(40)
    table[[7, 11, 30]] = 1.0
    for settings in (
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_k": 2},
        {"temperature": 1.0, "top_k": 10},
        {"temperature": 1.0, "top_p": 0.1},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.6},
    ):
        for seed in range(20):
            check_distribution(settings, table, seed)
    check_logprobs({"temperature": 1.0}, table, raw=True, k=12)
    wide = torch.zeros(5000)
    assert sample(wide[None], [row(logprobs=20)]).alternative_ids.tolist() == list(range(20))
    wide[4000] = -0.0  # equal to zero, so it ties with it
    assert sample(wide[None], [row(logprobs=20, temperature=0.0)]).alternative_ids.tolist() == list(range(20))


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("k", [0, 1, 5, 20])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 3.0])
def test_logprobs_are_of_the_models_logits_before_everything(temperature, k, raw):
    for settings in (
        {},
        {"top_k": 2, "top_p": 0.5},
        {"bias_ids": ids(3, 4), "bias_values": floats(9, -9), "presence_penalty": 1.0},
        {"allowed_ids": ids(60, 61)},
    ):
        check_logprobs({"temperature": temperature} | settings, logits(1, V)[0], raw, k)


def chi_square_limit(freedom: int) -> float:
    """Exceeded once in ten thousand (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3


def check_frequencies(counts: np.ndarray, probabilities: np.ndarray) -> None:
    draws = counts.sum()
    assert counts[probabilities == 0].sum() == 0
    common = probabilities * draws >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(probabilities[common], probabilities[~common].sum()) * draws
    keep = expected > 0
    statistic = ((observed[keep] - expected[keep]) ** 2 / expected[keep]).sum()
    assert statistic < chi_square_limit(int(keep.sum()) - 1)


@pytest.mark.parametrize("axis", ["seed", "index", "choice"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.0, "top_k": 12},
        {"top_p": 0.8},
        {"min_p": 0.1, "presence_penalty": 1.0},
    ],
)
def test_draws_follow_the_distribution_along_every_counter(axis, settings):
    table, draws = logits(1, 30, scale=1.5)[0], 4000
    expected = reference.distribution(table.double().numpy(), RowSampling(**settings), PROMPT, [])
    if axis == "seed":
        rows = [row(PROMPT, seed=seed * 1_000_003, **settings) for seed in range(draws)]
    elif axis == "choice":
        rows = [row(PROMPT, seed=7, choice=choice, **settings) for choice in range(draws)]
    else:
        rows = [row(PROMPT, seed=7, **settings)] * draws
    counts = np.zeros(30)
    for sampler_row in rows:
        counts[sample(table[None], [sampler_row]).token_ids[0]] += 1
        if axis == "index":
            sampler_row.num_output += 1  # the position moves on; the history stays as it is
    check_frequencies(counts, expected)


def test_neighbouring_positions_choices_and_seeds_are_independent():
    table, p = torch.zeros(1, 4), np.full(16, 1 / 16)
    for shift in ({"output": [0]}, {"choice": 1}, {"seed": 1}):
        counts = np.zeros(16)
        for n in range(3000):
            base = {"seed": n * 2, "output": [], "choice": 0}
            moved = base | shift | ({"seed": n * 2 + 1} if "seed" in shift else {})
            first, second = sample(table.expand(2, 4), [row(PROMPT, **base), row(PROMPT, **moved)]).token_ids
            counts[first * 4 + second] += 1
        check_frequencies(counts, p)
