"""Inputs that break samplers: the largest and smallest temperatures, empty and full sets, -inf, NaN, wide rows."""

import warnings

import numpy as np
import pytest
import torch

from tests.sampling.rows import floats, ids, logits, row
from tests.sampling.test_distribution import check_frequencies
from worker_svc.sampling import sample, score

WIDE = 151_936


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("temperature", [1e-5, 1e-6, 1e-12, 1e-38])
def test_temperatures_up_to_the_bound_are_greedy(temperature):
    table = logits(8, 384)
    rows = [row(seed=n, temperature=temperature, logprobs=1) for n in range(8)]
    drawn, greedy = sample(table, rows), sample(table, [row(temperature=0.0, logprobs=1)] * 8)
    assert np.array_equal(drawn.token_ids, greedy.token_ids) and np.array_equal(drawn.logprobs, greedy.logprobs)
    assert np.array_equal(drawn.token_ids, table.argmax(1))


@pytest.mark.parametrize("temperature", [2e-5, 1e-4, 1e-3, 1e2, 1e6, 1e30, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_temperature_gives_nan_or_a_positive_logprob(temperature, dtype):
    table = logits(8, 3000, dtype=dtype)
    drawn = sample(table, [row(seed=n, temperature=temperature, logprobs=20) for n in range(8)])
    assert (drawn.token_ids >= 0).all() and not len(drawn.failed_slots)
    for values in (drawn.logprobs, drawn.alternative_logprobs):
        assert not np.isnan(values).any() and (values <= 0).all()
    if temperature <= 1e-4:
        assert np.array_equal(drawn.token_ids, table.argmax(1))


def test_a_huge_temperature_is_uniform():
    table, counts = logits(1, 50, scale=5), np.zeros(50)
    for seed in range(2000):
        counts[sample(table, [row(seed=seed, temperature=1e6)]).token_ids[0]] += 1
    check_frequencies(counts, np.full(50, 1 / 50))


@pytest.mark.parametrize("extra", [{}, {"presence_penalty": 0.5}])
def test_top_k_off_and_above_the_vocabulary_are_the_same_draw(extra):
    table = logits(1, 128)
    for seed in range(50):
        tokens = {int(sample(table, [row(seed=seed, top_k=k, **extra)]).token_ids[0]) for k in (0, 128, 129, 9_999_999)}
        assert len(tokens) == 1


def test_a_nucleus_is_never_empty_and_may_be_everything():
    uniform = torch.zeros(1, WIDE)
    seen = {int(sample(uniform, [row(seed=seed, top_p=0.9999999)]).token_ids[0]) for seed in range(40)}
    off = {int(sample(uniform, [row(seed=seed)]).token_ids[0]) for seed in range(40)}
    assert seen == off  # nothing was cut off
    wide = logits(1, WIDE)
    best = int(wide.argmax())
    for settings in ({"top_p": 1e-30}, {"top_p": 0.0}, {"min_p": 1.0}, {"top_k": 1, "top_p": 0.0}):
        assert {int(sample(wide, [row(seed=seed, **settings)]).token_ids[0]) for seed in range(5)} == {best}


def test_wide_rows_hold_every_feature():
    table = logits(4, WIDE)
    kinds = [{"logprobs": 20}, {"top_p": 0.95, "temperature": 3.0}, {"top_k": 70_000}, {"min_p": 1e-6}]
    for settings in kinds:
        drawn = sample(table, [row(seed=n, **settings) for n in range(4)])
        assert ((drawn.token_ids >= 0) & (drawn.token_ids < WIDE)).all()
    flat = sample(torch.zeros(1, WIDE), [row(logprobs=20, seed=3)])
    assert flat.logprobs[0] == pytest.approx(-np.log(WIDE), abs=1e-5)


def test_minus_infinity_is_legal_and_never_drawn():
    table = logits(1, 2000)
    table[0, 10:] = -torch.inf
    tokens = [int(sample(table, [row(seed=seed, temperature=50.0)]).token_ids[0]) for seed in range(200)]
    assert set(tokens) == set(range(10))
    drawn = sample(table, [row(logprobs=20)])
    assert drawn.alternative_ids.tolist()[10:] == list(range(10, 20))
    assert np.isneginf(drawn.alternative_logprobs[10:]).all() and np.isfinite(drawn.alternative_logprobs[:10]).all()
    for settings in ({"top_k": 50}, {"top_p": 0.999}, {"min_p": 1e-30}, {"allowed_ids": ids(9, 1500)}):
        assert sample(table, [row(seed=3, temperature=9.0, **settings)]).token_ids[0] < 10


@pytest.mark.parametrize("place", [0, 5, 1023, 1024, 2999])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_row_fails_and_its_neighbours_do_not_notice(poison, place):
    table = logits(6, 3000)
    kinds = [{"temperature": 0.0}, {"logprobs": 2}, {"top_k": 5}, {"allowed_ids": ids(7, 8), "logprobs": 1}]
    for bad, settings in enumerate([*kinds, {"top_p": 0.5}, {"bad_ids": ids(place)}]):
        rows = [row(seed=n, slot=10 + n, **(settings if n == bad else {"logprobs": 1})) for n in range(6)]
        clean, poisoned = sample(table, rows), table.clone()
        poisoned[bad, place] = poison
        drawn = sample(poisoned, rows)
        assert drawn.failed_slots.tolist() == [10 + bad] and drawn.token_ids[bad] == -1 and drawn.logprobs[bad] == 0
        others = [n for n in range(6) if n != bad]
        assert np.array_equal(drawn.token_ids[others], clean.token_ids[others])
        assert np.array_equal(drawn.logprobs[others], clean.logprobs[others])
        assert len(drawn.alternative_ids) == len(clean.alternative_ids)  # the layout stands


def test_a_row_with_nothing_left_to_draw_fails():
    table = logits(2, 64)
    nothing = row(slot=4, allowed_ids=ids(3), bad_ids=ids(3), logprobs=1)
    drawn = sample(table, [nothing, row(slot=5)])
    assert drawn.failed_slots.tolist() == [4] and drawn.token_ids[1] >= 0
    assert sample(torch.full((1, 64), -torch.inf), [row(slot=1)]).failed_slots.tolist() == [1]


def test_extreme_biases_decide():
    table = logits(1, 384)
    for settings in ({}, {"temperature": 0.0}, {"top_p": 0.9}):
        assert sample(table, [row(bias_ids=ids(77), bias_values=floats(1e6), **settings)]).token_ids[0] == 77
        assert sample(table, [row(bias_ids=ids(77), bias_values=floats(-1e30), **settings)]).token_ids[0] != 77


def test_the_sampler_changes_neither_logits_nor_rows():
    table = logits(2, 3000)
    before = table.clone()
    rows = [row(presence_penalty=1.0, bias_ids=ids(1), bias_values=floats(2), logprobs=3), row(bad_ids=ids(5))]
    first, second = sample(table, rows), sample(table, rows)
    assert torch.equal(table, before) and np.array_equal(first.token_ids, second.token_ids)


def test_min_tokens_masks_stop_ids_until_they_are_out():
    table = torch.zeros(1, 50)
    table[0, 9] = 100.0
    sampler_row = row([1], [], min_tokens=2, stop_ids=ids(9), temperature=0.0)
    for expected in (0, 0, 9):
        token = int(sample(table, [sampler_row]).token_ids[0])
        assert token == expected
        sampler_row.append(token)


@pytest.mark.parametrize("settings", [{"presence_penalty": 0.9, "frequency_penalty": 0.4}, {"repetition_penalty": 1.5}])
def test_history_grown_token_by_token_is_history_introduced(settings):
    """A row that was preempted and introduced again continues as if nothing had happened."""
    table, rng = logits(1, 300), np.random.default_rng(0)
    output = rng.integers(0, 300, 200).tolist()
    grown = row([1, 2], [], seed=4, **settings)
    for count, token in enumerate(output):
        again = row([1, 2], output[:count], seed=4, **settings)
        assert sample(table, [grown]).token_ids[0] == sample(table, [again]).token_ids[0]
        assert np.array_equal(grown.process(table[0].numpy()), again.process(table[0].numpy()))
        grown.append(token)


def test_single_precision_parameters_mean_the_same_in_process_and_on_the_wire():
    table = logits(64, 500)
    for settings in ({"temperature": 0.6}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.1}):
        wire = {name: float(np.float32(value)) for name, value in settings.items()}
        one = sample(table, [row(seed=n, logprobs=3, **settings) for n in range(64)])
        two = sample(table, [row(seed=n, logprobs=3, **wire) for n in range(64)])
        assert np.array_equal(one.token_ids, two.token_ids) and np.array_equal(one.logprobs, two.logprobs)


def test_scores_of_a_poisoned_position_are_nan_and_its_neighbours_stand():
    table = logits(3, 2000)
    clean = score(table, ids(5, 6, 7), 2)
    table[1, 1999] = torch.nan
    values, alternatives, logprobs = score(table, ids(5, 6, 7), 2)
    assert np.isnan(values).tolist() == [False, True, False] and np.isnan(logprobs[2:4]).all()
    assert values[[0, 2]].tolist() == clean[0][[0, 2]].tolist()
    assert np.array_equal(alternatives[[0, 1, 4, 5]], clean[1][[0, 1, 4, 5]])
