"""The models compute what transformers computes, at every tp, and what a reference from raw weights computes."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.worker import huggingface, jobs
from tests.worker.rank_pool import RankPool
from tests.worker.reference import reference_logits

# family and what makes its shape awkward; every one has an odd vocabulary and grouped heads
MODELS = {
    "llama": ("llama", {}),
    "llama-biased": ("llama", dict(attention_bias=True, tie_word_embeddings=True)),
    "qwen3": ("qwen3", dict(hidden_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=16)),
    "mistral": ("mistral", dict(vocab_size=2049)),
    "mistral-window": ("mistral", dict(sliding_window=20)),
    "qwen2": ("qwen2", dict(num_key_value_heads=1, vocab_size=3073)),
    "olmoe": ("olmoe", dict(clip_qkv=1.5)),
    "qwen3_moe": ("qwen3_moe", dict(num_experts_per_tok=3)),
    "mixtral": ("mixtral", dict(sliding_window=20, num_key_value_heads=2)),
}
NAMES = list(MODELS)


def prompts(vocab_size: int = 385, count: int = 6) -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in (1, 5, 16, 17, 40, 65)[:count]]


@pytest.fixture(scope="session")
def oracle(tiny: Callable[..., Path]) -> Callable[[str, str], list[list[int]]]:
    @cache
    def greedy(name: str, dtype: str) -> list[list[int]]:
        model = huggingface.load(tiny(MODELS[name][0], **MODELS[name][1]), getattr(torch, dtype))
        return [huggingface.greedy(model, prompt, 40) for prompt in prompts()]

    return greedy


@pytest.mark.parametrize("tp", (1, 2, 4))
@pytest.mark.parametrize("dtype", ("float32", "float64"))
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_transformers(
    name: str,
    dtype: str,
    tp: int,
    tiny: Callable[..., Path],
    ranks: RankPool,
    oracle: Callable[[str, str], list[list[int]]],
) -> None:
    family, overrides = MODELS[name]
    answers = ranks.run(tp, jobs.greedy, str(tiny(family, **overrides)), dtype, prompts(), 40)
    for rank, answer in enumerate(answers):
        assert answer == oracle(name, dtype), f"rank {rank}"


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name: str, tiny: Callable[..., Path], ranks: RankPool) -> None:
    family, overrides = MODELS[name]
    folder = tiny(family, **overrides)
    tokens = prompts()[-1] * 5
    expected = huggingface.logits(huggingface.load(folder), tokens).numpy()
    (got,) = ranks.run(1, jobs.logits, str(folder), "float32", tokens)
    assert np.abs(got - expected).max() < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_fp64_logits_equal_the_reference_and_do_not_depend_on_tp(
    name: str, tiny: Callable[..., Path], ranks: RankPool
) -> None:
    family, overrides = MODELS[name]
    folder = tiny(family, **overrides)
    tokens = prompts()[-1] * 5
    expected = reference_logits(folder, tokens).numpy()
    (alone,) = ranks.run(1, jobs.logits, str(folder), "float64", tokens)
    assert np.abs(alone - expected).max() < 1e-9
    for tp in (2, 4):
        for got in ranks.run(tp, jobs.logits, str(folder), "float64", tokens, chunks=(7, 1, 64)):
            assert np.abs(got - alone).max() < 1e-12


# mutant, the model on which it shows, tp
FAULTS = (
    ("drop_last_key", "llama", 1),
    ("ignore_block_offset", "llama", 1),
    ("mirrored_slice", "llama", 2),
    ("skipped_reduce", "llama", 2),
    ("mirrored_kv_heads", "qwen3", 2),
    ("dropped_bias", "qwen2", 1),
    ("window_off_by_one", "mistral-window", 1),
    ("flipped_renormalisation", "olmoe", 1),
    ("flipped_renormalisation", "qwen3_moe", 1),
    ("local_full_norm", "olmoe", 2),
    ("unclipped", "olmoe", 1),
)


@pytest.mark.parametrize(("mutant", "name", "tp"), FAULTS)
def test_a_fault_shows(mutant: str, name: str, tp: int, tiny: Callable[..., Path], ranks: RankPool) -> None:
    family, overrides = MODELS[name]
    folder = tiny(family, **overrides)
    tokens = prompts()[-1]
    expected = huggingface.logits(huggingface.load(folder), tokens).numpy()
    honest = ranks.run(tp, jobs.logits, str(folder), "float32", tokens)[0]
    broken = ranks.run(tp, jobs.logits, str(folder), "float32", tokens, mutant=mutant)[0]
    assert np.abs(honest - expected).max() < 1e-4
    assert not np.abs(broken - expected).max() < 1e-2
