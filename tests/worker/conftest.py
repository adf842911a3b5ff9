"""Fixtures of the worker's tests: one pool of ranks and one set of tiny models a session."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks and tests share two cores

import pytest

from tests.tiny_models import make_tiny
from tests.worker.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny("qwen3", num_attention_heads=6): the folder of that model, made once a session."""
    made: dict[str, Path] = {}

    def make(family: str = "llama", **overrides: Any) -> Path:
        key = repr((family, sorted(overrides.items(), key=lambda item: item[0])))
        if key not in made:
            made[key] = make_tiny(tmp_path_factory.mktemp(family), family, **overrides)
        return made[key]

    return make
