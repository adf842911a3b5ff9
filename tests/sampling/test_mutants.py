"""Each oracle of these tests, held against a sampler broken on purpose: it must die, and the unbroken one must live."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.sampling import test_distribution, test_extremes, test_invariance
from tests.sampling.rows import logits
from worker_svc.sampling import SamplerRow, kernels, logsumexp, philox, plain, sample, sampler, scores, selection
from worker_svc.sampling.sampler import Drawn


def distributions() -> None:
    tables = logits(4, test_distribution.V)
    for n, settings in enumerate(test_distribution.every_setting()):
        if n % 17 == 0:
            test_distribution.check_distribution(settings, tables[n % 4], n)


def ties() -> None:
    test_distribution.test_ties_go_to_the_lower_id_everywhere()


def logprobs() -> None:
    for raw in (False, True):
        for temperature in (0.0, 0.6):
            test_distribution.test_logprobs_are_of_the_models_logits_before_everything(temperature, 5, raw)


def crowds() -> None:
    test_invariance.check_alone_equals_crowd(sampler.sample)


def shards() -> None:
    test_invariance.test_shards_of_the_vocabulary_score_the_same_bits_as_the_whole(5000, torch.float32)
    test_invariance.test_shards_of_the_vocabulary_score_the_same_bits_as_the_whole(49_152, torch.float64)


def poison() -> None:
    test_extremes.test_a_poisoned_row_fails_and_its_neighbours_do_not_notice(float("nan"), 5)


def histories() -> None:
    test_extremes.test_history_grown_token_by_token_is_history_introduced({"presence_penalty": 0.9})


def stops() -> None:
    test_extremes.test_min_tokens_masks_stop_ids_until_they_are_out()


ORIGINAL_INIT = SamplerRow.__init__

# Mutants: each takes monkeypatch's setattr and breaks one thing.

Break = Callable[..., None]


def _over_rows(change: Callable[[list[SamplerRow]], list[SamplerRow]]) -> Callable[..., Drawn]:
    return lambda table, rows: sample(table, change(list(rows)))


def _copy(sampler_row: SamplerRow, **changes: object) -> SamplerRow:
    twin = SamplerRow.__new__(SamplerRow)
    twin.__dict__.update(sampler_row.__dict__)
    twin.__dict__.update(changes)
    return twin


def noise_keyed_by_row(set_: Break) -> None:
    set_(sampler, "sample", _over_rows(lambda rows: [_copy(r, choice=n) for n, r in enumerate(rows)]))


def largest_top_k_of_the_batch(set_: Break) -> None:
    set_(sampler, "sample", _over_rows(lambda rows: [_copy(r, top_k=max(x.top_k for x in rows)) for r in rows]))


def greedy_if_any_row_is(set_: Break) -> None:
    set_(sampler, "sample", _over_rows(lambda rows: [_copy(r, greedy=any(x.greedy for x in rows)) for r in rows]))


def top_p_before_top_k(set_: Break) -> None:
    def select(z, maximum, temperature, top_k, top_p, min_p):
        kept = original(z, maximum, temperature, 0, top_p, min_p)
        if kept is None or not 0 < top_k < len(kept.ids):
            return kept if kept is not None else original(z, maximum, temperature, top_k, 1.0, min_p)
        best = np.sort(np.lexsort((kept.ids, -kept.scores))[:top_k])
        return selection.Kept(kept.ids[best], kept.scores[best])

    original = selection.select
    set_(test_distribution, "select", select)
    set_(sampler, "select", select)


def nucleus_one_short(set_: Break) -> None:
    original = selection._nucleus
    set_(selection, "_nucleus", lambda s, z, p: inside[:-1] if len(inside := original(s, z, p)) > 1 else inside)


def min_p_is_absolute(set_: Break) -> None:
    def select(z, maximum, temperature, top_k, top_p, min_p):
        weights = np.exp((z.astype(np.float64) - maximum) / temperature)
        return original(z, maximum, temperature, top_k, top_p, min(1.0, min_p * weights.sum()))

    original = selection.select
    set_(test_distribution, "select", select)
    set_(sampler, "select", select)


def ties_reversed(set_: Break) -> None:
    set_(selection, "order", lambda z, column: np.lexsort((-column, -z)))


def last_argmax(set_: Break) -> None:
    set_(sampler, "top", lambda z, k: np.arange(len(z), dtype=np.int32)[::-1][np.argsort(-z[::-1], kind="stable")[:k]])


def temperature_applied_to_raw(set_: Break) -> None:
    set_(SamplerRow, "__init__", _reported(lambda r: r.temperature if not r.greedy else 1.0))


def raw_reported_as_tempered(set_: Break) -> None:
    set_(SamplerRow, "__init__", _reported(lambda r: 1.0))


def _reported(rule: Callable[[SamplerRow], float]) -> Callable[..., None]:
    def init(self, introduced):
        ORIGINAL_INIT(self, introduced)
        self.report_temperature = rule(self)

    return init


def logprobs_after_bias(set_: Break) -> None:
    original = sampler._sample_row
    set_(sampler, "_sample_row", lambda z, r, blocks: original(r.process(z), r, blocks))


def logprob_divided_by_temperature(set_: Break) -> None:
    set_(logsumexp.LogSumExp, "log_prob", lambda self, x: (x - self.maximum - self.log_sum) / self.temperature)


def presence_counts_the_prompt(set_: Break) -> None:
    def init(self, introduced):
        ORIGINAL_INIT(self, introduced)
        if self._penalised:
            for token in introduced.token_ids[: introduced.num_prompt].tolist():
                self._see(token, 1)

    set_(SamplerRow, "__init__", init)


def generated_tokens_forgotten(set_: Break) -> None:
    def init(self, introduced):
        ORIGINAL_INIT(self, replace(introduced, token_ids=introduced.token_ids[: introduced.num_prompt]))
        self.num_output = len(introduced.token_ids) - introduced.num_prompt

    set_(SamplerRow, "__init__", init)


def index_counts_from_the_introduction(set_: Break) -> None:
    def init(self, introduced):
        ORIGINAL_INIT(self, introduced)
        self.num_output = 0

    set_(SamplerRow, "__init__", init)


def word_of_the_next_id(set_: Break) -> None:
    set_(
        kernels, "complements", lambda keys, index, choice, column: philox.complements(keys, index, choice, column + 1)
    )


def candidates_too_few(set_: Break) -> None:
    set_(kernels, "race", lambda *a: plain.race(*a)[:1])
    set_(kernels, "race_ids", lambda *a: plain.race_ids(*a)[:1])


def blocks_cut_by_shard(set_: Break) -> None:
    """Sums that run over whatever a rank has, as a plain sum would."""

    def exp_blocks(x, offsets, temperature, e, sums):
        plain.exp_blocks(x, offsets, temperature, e, sums)
        sums[:] = np.add.accumulate(e, axis=1)[:, -1] * np.float32(1 + 1e-7 * len(sums))

    set_(kernels, "exp_blocks", exp_blocks)


def fold_in_order_of_arrival(set_: Break) -> None:
    original = scores.fold_scores
    set_(test_invariance, "fold_scores", lambda parts: original(parts[::-1]))


def nan_test_over_the_batch(set_: Break) -> None:
    def broken(table, rows):
        drawn = sample(table, rows)
        if len(drawn.failed_slots):
            return replace(drawn, token_ids=np.full_like(drawn.token_ids, -1))
        return drawn

    set_(test_extremes, "sample", broken)


def nan_unnoticed(set_: Break) -> None:
    set_(test_extremes, "sample", lambda table, rows: sample(table.nan_to_num(nan=-1e30), rows))


def stop_ids_unmasked(set_: Break) -> None:
    set_(SamplerRow, "_stops_masked", property(lambda self: False))


MUTANTS = [
    (noise_keyed_by_row, crowds),
    (largest_top_k_of_the_batch, crowds),
    (greedy_if_any_row_is, crowds),
    (top_p_before_top_k, distributions),
    (nucleus_one_short, distributions),
    (min_p_is_absolute, distributions),
    (presence_counts_the_prompt, distributions),
    (generated_tokens_forgotten, histories),
    (index_counts_from_the_introduction, histories),
    (index_counts_from_the_introduction, distributions),
    (word_of_the_next_id, distributions),
    (candidates_too_few, distributions),
    (stop_ids_unmasked, distributions),
    (stop_ids_unmasked, stops),
    (ties_reversed, ties),
    (last_argmax, ties),
    (temperature_applied_to_raw, logprobs),
    (raw_reported_as_tempered, logprobs),
    (logprobs_after_bias, logprobs),
    (logprob_divided_by_temperature, logprobs),
    (blocks_cut_by_shard, shards),
    (fold_in_order_of_arrival, shards),
    (nan_test_over_the_batch, poison),
    (nan_unnoticed, poison),
]


@pytest.mark.parametrize("oracle", sorted({oracle for _, oracle in MUTANTS}, key=lambda o: o.__name__))
def test_control_lives(oracle):
    oracle()


@pytest.mark.parametrize(("mutant", "oracle"), MUTANTS)
def test_mutant_dies(mutant, oracle, monkeypatch):
    mutant(monkeypatch.setattr)
    with pytest.raises(AssertionError):
        oracle()


def test_chi_square_sees_noise_that_is_slightly_off(monkeypatch):
    """Uniforms squeezed by a few percent: the distribution test is sharp enough to tell."""
    exact = kernels.complements
    monkeypatch.setattr(kernels, "complements", lambda *a: exact(*a) ** 1.15)
    monkeypatch.setattr(kernels, "race", lambda k, i, c, e, f, room: np.flatnonzero(e * f[:, None]).astype(np.int32))
    with pytest.raises(AssertionError):
        test_distribution.test_draws_follow_the_distribution_along_every_counter("seed", {})
