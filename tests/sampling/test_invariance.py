"""A draw is a function of its row: not of the batch, the place in it, the threads, or how the vocabulary is cut."""

import numpy as np
import pytest
import torch

from tests.sampling import reference
from tests.sampling.rows import floats, ids, logits, row
from worker_svc.sampling import fold_scores, sample, score, shard_scores

KINDS = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.6, "logprobs": 0},
    {"top_k": 7, "logprobs": 5},
    {"top_k": 64, "raw_logprobs": True, "temperature": 0.8, "logprobs": 1},
    {"top_p": 0.7},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "logprobs": 20},
    {"presence_penalty": 0.6, "repetition_penalty": 1.2, "logprobs": 3},
    {"bias_ids": ids(5), "bias_values": floats(4.0), "bad_ids": ids(9)},
    {"allowed_ids": ids(3, 4, 5, 6), "logprobs": 4},
    {"temperature": 4.0, "logprobs": 7},
]


def crowd(size: int, first: int = 0) -> list:
    return [
        row([1, 2, n % 5], list(range(n % 4)), seed=first + n, choice=n % 3, slot=n, **KINDS[(first + n) % len(KINDS)])
        for n in range(size)
    ]


def per_row(drawn, rows) -> list[tuple]:
    """What each row was told, as bytes."""
    result, start = [], 0
    for r, sampler_row in enumerate(rows):
        k = sampler_row.sampling.logprobs or 0
        part = slice(start, start + k)
        start += k
        result.append(
            (
                int(drawn.token_ids[r]),
                drawn.logprobs[r].tobytes(),
                drawn.alternative_ids[part].tobytes(),
                drawn.alternative_logprobs[part].tobytes(),
            )
        )
    assert start == len(drawn.alternative_ids)
    return result


def check_alone_equals_crowd(draw, size: int = 40, vocab_size: int = 3000) -> None:
    table, rows = logits(size, vocab_size), crowd(size)
    alone = [per_row(draw(table[n : n + 1], [rows[n]]), [rows[n]])[0] for n in range(size)]
    assert per_row(draw(table, rows), rows) == alone
    rng = np.random.default_rng(1)
    for _ in range(6):
        chosen = rng.permutation(size)[: int(rng.integers(1, size))]
        some = [rows[n] for n in chosen]
        assert per_row(draw(table[chosen], some), some) == [alone[n] for n in chosen]


@pytest.mark.parametrize("vocab_size", [97, 384, 3000, 49_152])
def test_a_row_alone_is_the_row_in_any_batch_at_any_place(vocab_size):
    check_alone_equals_crowd(sample, 40 if vocab_size < 4000 else 12, vocab_size)


def test_threads_and_memory_layout_change_nothing():
    table, rows = logits(20, 5000), crowd(20)
    expected = per_row(sample(table, rows), rows)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            assert per_row(sample(table, rows), rows) == expected
    finally:
        torch.set_num_threads(threads)
    padded = torch.zeros(20, 5003)
    padded[:, 3:] = table
    assert per_row(sample(padded[:, 3:], rows), rows) == expected
    assert per_row(sample(table.t().contiguous().t(), rows), rows) == expected
    assert per_row(sample(table.numpy(), rows), rows) == expected


def cuts(vocab_size: int, ranks: int) -> list[tuple[int, int]]:
    """Whole 1024-id blocks, as even as they go; the last ranks may have none."""
    blocks = -(-vocab_size // 1024)
    edges = [min(vocab_size, 1024 * (blocks * rank // ranks)) for rank in range(ranks + 1)]
    return [(edges[rank], edges[rank + 1]) for rank in range(ranks)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab_size", [5, 99, 100, 1024, 1025, 5000, 49_152])
def test_shards_of_the_vocabulary_score_the_same_bits_as_the_whole(vocab_size, dtype):
    table = logits(6, vocab_size, dtype=dtype)
    table[2, :] = 1.5  # nothing but ties
    table[3, vocab_size // 2 :] = -torch.inf
    targets = ids(0, vocab_size - 1, vocab_size // 2, vocab_size - 1, 1, 2)
    k = min(5, vocab_size)
    whole = fold_scores([shard_scores(table, 0, targets, k)])
    for ranks in (2, 3, 4, 8):
        parts = [shard_scores(table[:, a:b], a, targets, k) for a, b in cuts(vocab_size, ranks)]
        for one, other in zip(whole, fold_scores(parts)):
            assert one.tobytes() == other.tobytes()
    exact = np.array([reference.log_softmax(line, 1.0)[t] for line, t in zip(table.double().numpy(), targets)])
    assert np.allclose(
        whole[0], exact, rtol=1e-12 if dtype == torch.float64 else 2e-7, atol=1e-12 if dtype == torch.float64 else 1e-6
    )
    argmax = [int(line.argmax()) for line in table.numpy()]
    assert whole[1][:, 0].tolist() == argmax


def test_a_position_scores_the_same_alone_and_among_others():
    table, targets = logits(30, 3000), np.arange(30, dtype=np.int32)
    values, alternatives, logprobs = score(table, targets, 3)
    for p in (0, 7, 29):
        one = score(table[p : p + 1], targets[p : p + 1], 3)
        assert one[0][0] == values[p]
        assert np.array_equal(one[1], alternatives[3 * p : 3 * p + 3])
        assert np.array_equal(one[2], logprobs[3 * p : 3 * p + 3])


def test_a_prompt_score_is_the_raw_logprob_of_a_drawn_token():
    """One log-sum-exp in the whole engine: what scoring says of a token is what drawing it reported."""
    table = logits(40, 3000)
    drawn = sample(table, [row(seed=n, logprobs=4, raw_logprobs=True, temperature=0.7, top_k=9) for n in range(40)])
    values, alternatives, logprobs = score(table, drawn.token_ids, 4)
    assert values.tobytes() == drawn.logprobs.tobytes()
    assert np.array_equal(alternatives, drawn.alternative_ids)
    assert logprobs.tobytes() == drawn.alternative_logprobs.tobytes()
