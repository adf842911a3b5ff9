"""`fast` is a path of its own: near `invariant`, the same greedy tokens in fp64, and free to differ in bits."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.worker import jobs
from tests.worker.rank_pool import RankPool
from worker_svc.models import load_model

PROMPT = [(7 * i) % 385 for i in range(90)]


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize(("dtype", "tolerance"), (("float32", 1e-5), ("float64", 1e-12), ("bfloat16", 0.1)))
@pytest.mark.parametrize("family", ("llama", "qwen3_moe"))
def test_fast_is_near_invariant(
    family: str, dtype: str, tolerance: float, tp: int, tiny: Callable[..., Path], ranks: RankPool
) -> None:
    folder = str(tiny(family))
    exact = ranks.run(tp, jobs.logits, folder, dtype, PROMPT)[0]
    fast = ranks.run(tp, jobs.logits, folder, dtype, PROMPT, numerics="fast")[0]
    # on average: in bfloat16 a router's near tie may fall to the other expert, which moves single rows far
    assert np.abs(exact - fast).mean() < tolerance
    if dtype == "float64":
        assert np.array_equal(exact.argmax(-1), fast.argmax(-1))


def test_fast_takes_another_path(tiny: Callable[..., Path]) -> None:
    exact, fast = (load_model(tiny(), numerics=mode).ops.numerics for mode in ("invariant", "fast"))  # type: ignore[attr-defined,arg-type]
    assert exact.leaves and not fast.leaves


@pytest.mark.parametrize("family", ("llama", "qwen3", "mistral"))
def test_bfloat16_keys_and_values_under_a_float32_model(
    family: str, tiny: Callable[..., Path], ranks: RankPool
) -> None:
    """Half the bytes; logits move by less than 6e-3 of a logit's scale, greedy tokens not at all."""
    folder = str(tiny(family, initializer_range=0.05))
    (usual,) = ranks.run(1, jobs.logits, folder, "float32", PROMPT)
    (halved,) = ranks.run(1, jobs.logits, folder, "float32", PROMPT, kv_dtype="bfloat16")
    assert 0 < np.abs(usual - halved).max() < 6e-3
    prompts = [PROMPT[:n] for n in (3, 20, 60)]
    expected = ranks.run(1, jobs.greedy, folder, "float32", prompts, 20)
    assert ranks.run(1, jobs.greedy, folder, "float32", prompts, 20, kv_dtype="bfloat16") == expected
