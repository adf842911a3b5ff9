"""The compiled steps compute what their plain twins compute, and the twins keep the same promises."""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.worker.driver import Driver
from worker_svc.models import load_model
from worker_svc.ops import compiled, invariance
from worker_svc.ops.attention_tiles import EXP, attention_tiles
from worker_svc.ops.cpu import CpuOps
from worker_svc.ops.cpu_compiled import CompiledCpuOps

PROMPT = [(11 * i) % 385 for i in range(300)]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[torch.dtype], CpuOps]]:
    """Ops as they are where numba is absent."""
    monkeypatch.setattr(invariance, "_compiled_serves", lambda dtype: False)
    invariance.probe.cache_clear()
    yield lambda dtype: CpuOps(dtype, invariance.probe(dtype))
    invariance.probe.cache_clear()


# A mixture is compared in float32 only: in bfloat16 a router's near ties fall otherwise, and whole rows move.
@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"),
    [(family, torch.float32, 1e-4) for family in ("llama", "qwen3", "olmoe", "mistral")]
    + [(family, torch.bfloat16, 0.1) for family in ("llama", "qwen3", "mistral")],
)
def test_twins_agree(
    family: str, dtype: torch.dtype, tolerance: float, tiny: Callable[..., Path], plain: Callable[..., CpuOps]
) -> None:
    folder = tiny(family, **({"sliding_window": 50} if family == "mistral" else {}))
    twin = Driver(load_model(folder, dtype=dtype, ops=plain(dtype))).logits(PROMPT)
    compiled = Driver(load_model(folder, dtype=dtype, ops=CompiledCpuOps(dtype, invariance.probe(dtype)))).logits(
        PROMPT
    )
    assert 0 < (twin - compiled).abs().mean() < tolerance


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_plain_twin_keeps_its_bits_for_any_chunking(
    dtype: torch.dtype, tiny: Callable[..., Path], plain: Callable[..., CpuOps]
) -> None:
    driver = Driver(load_model(tiny("qwen3"), dtype=dtype, ops=plain(dtype)))
    whole = driver.logits(PROMPT)
    for chunks in ((1,) * 20, (16,) * 10, (257, 1), (31, 200, 1)):
        assert torch.equal(driver.logits(PROMPT, chunks), whole), chunks


def test_exp_has_the_bits_of_its_twin() -> None:
    """The one in LLVM's text, of many at a time, and the one that numba compiles."""
    values = np.random.default_rng(1).normal(0, 30, 1 << 14).astype(np.float32)
    values[:8] = np.nan, np.inf, -np.inf, 0, -0.0, 88, -87, 1e30
    expected, powers = values.copy(), np.empty(len(values), np.int32)
    compiled._exp(expected, powers, powers.view(np.float32), len(values))
    call = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(int(attention_tiles()[EXP]))
    call(values.ctypes.data, len(values))
    assert values.tobytes() == expected.tobytes()
