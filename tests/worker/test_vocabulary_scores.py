"""Scores without gathering equal the full softmax, and greedy tokens the argmax with ties to the lowest id."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.worker import jobs
from tests.worker.rank_pool import RankPool
from worker_svc.sampling import fold_scores, shard_scores

TOKENS, TARGETS = [1, 4, 2, 0, 3], [4, 2, 0, 3, 1]


@pytest.mark.parametrize("tp", (1, 2, 4))
@pytest.mark.parametrize("vocab_size", (5, 99, 100, 3000))
def test_scores_equal_the_full_softmax(vocab_size: int, tp: int, tiny: Callable[..., Path], ranks: RankPool) -> None:
    folder = str(tiny("llama", vocab_size=vocab_size, bos_token_id=1, eos_token_id=2, pad_token_id=0))
    (logits,) = ranks.run(1, jobs.logits, folder, "float64", TOKENS)
    expected = torch.from_numpy(logits).log_softmax(-1).numpy()
    for logprobs, ids, values, greedy in ranks.run(tp, jobs.scores, folder, "float64", TOKENS, TARGETS, 3):
        assert np.abs(logprobs - expected[np.arange(5), TARGETS]).max() < 1e-12
        assert np.array_equal(ids, np.argsort(-expected, axis=-1, kind="stable")[:, :3])
        assert np.abs(values - np.take_along_axis(expected, ids, 1)).max() < 1e-12
        assert np.array_equal(greedy, logits.argmax(-1))


@pytest.mark.parametrize("vocab_size", (5, 99, 100))
def test_fewer_rows_than_ranks(vocab_size: int, tiny: Callable[..., Path], ranks: RankPool) -> None:
    """One row on four ranks, three of which hold no id."""
    folder = str(tiny("llama", vocab_size=vocab_size, bos_token_id=1, eos_token_id=2, pad_token_id=0))
    (logits,) = ranks.run(1, jobs.logits, folder, "float64", TOKENS[:1])
    expected = torch.from_numpy(logits).log_softmax(-1).numpy()
    for logprobs, ids, _, greedy in ranks.run(4, jobs.scores, folder, "float64", TOKENS[:1], TARGETS[:1], 2):
        assert np.abs(logprobs - expected[0, TARGETS[0]]).max() < 1e-12
        assert ids.tolist() == [np.argsort(-expected[0], kind="stable")[:2].tolist()]
        assert greedy.tolist() == [logits[0].argmax()]


@pytest.mark.parametrize("tp", (2, 4))
def test_scores_have_the_bits_of_one_rank(tp: int, tiny: Callable[..., Path], ranks: RankPool) -> None:
    folder = str(tiny("llama", vocab_size=3000))
    (alone,) = ranks.run(1, jobs.scores, folder, "float32", TOKENS, TARGETS, 2)
    for found in ranks.run(tp, jobs.scores, folder, "float32", TOKENS, TARGETS, 2):
        assert all(np.array_equal(a, b) for a, b in zip(found, alone, strict=True))


def test_equal_logits_give_the_lowest_id(tiny: Callable[..., Path], ranks: RankPool) -> None:
    folder = str(tiny("llama", vocab_size=3000))
    for _, ids, _, greedy in ranks.run(4, jobs.scores, folder, "float32", TOKENS, TARGETS, 2, ties=True):
        assert greedy.tolist() == [0] * 5 and ids.tolist() == [[0, 1]] * 5


def test_a_fold_that_forgets_a_shard_shows() -> None:
    table = torch.randn(4, 3000)
    targets = np.array([5, 1500, 2500, 2999], np.int32)
    parts = [shard_scores(table[:, a:b], a, targets) for a, b in ((0, 1024), (1024, 3000))]
    honest = fold_scores(parts)[0]
    broken = fold_scores(parts[:1])[0]
    expected = table.log_softmax(-1).numpy()[np.arange(4), targets]
    assert np.abs(honest - expected).max() < 1e-5 and np.abs(broken - expected).max() > 1e-2
