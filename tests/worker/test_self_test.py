"""The self-test chooses by asking this machine, and sees a machine that breaks a promise."""

import time

import pytest
import torch
from torch import Tensor

from worker_svc.ops import invariance
from worker_svc.ops.matmul import CpuWeight, MatmulPath, matmul


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_it_finds_a_path_within_its_time(dtype: torch.dtype) -> None:
    invariance.probe.cache_clear()
    took = []
    for _ in range(3):
        invariance.probe.cache_clear()
        start = time.process_time()
        chosen = invariance.probe(dtype)
        took.append(time.process_time() - start)
    assert invariance.matmul_is_invariant(dtype, chosen.matmul)
    assert chosen.across_tp
    assert min(took) < 3.0  # 0.15 s on two quiet cores; the margin is for busy ones


def by_rows(x: Tensor, weight: CpuWeight) -> Tensor:
    """A library that treats a single row otherwise: K in two parts."""
    if len(x) > 1:
        return matmul(x, weight)
    half = x.clone()
    half[:, x.shape[1] // 2 :] = 0
    return matmul(half, weight) + matmul(x - half, weight)


def by_columns(x: Tensor, weight: CpuWeight) -> Tensor:
    """A library whose narrow products differ."""
    return matmul(x, weight) if weight.num_outputs > 96 else matmul(x.flip(0), weight).flip(0) * (1 + 2**-20)


def by_threads(x: Tensor, weight: CpuWeight) -> Tensor:
    return matmul(x, weight) * (1.0 if torch.get_num_threads() > 1 else 1 + 2**-20)


@pytest.mark.parametrize("product", (by_rows, by_columns, by_threads))
def test_a_library_that_breaks_the_promise_is_not_chosen(product) -> None:  # type: ignore[no-untyped-def]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        path = invariance.probe(torch.float32).matmul
        assert invariance.matmul_is_invariant(torch.float32, path)
        assert not invariance.matmul_is_invariant(torch.float32, path, product)
    finally:
        torch.set_num_threads(threads)


def test_no_path_is_said_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    invariance.probe.cache_clear()
    monkeypatch.setattr(invariance, "matmul_is_invariant", lambda *args, **kwargs: False)
    with pytest.raises(invariance.NotInvariant, match="float32"):
        invariance.probe(torch.float32)
    invariance.probe.cache_clear()


@pytest.mark.parametrize("path", (MatmulPath("blas", 16, row_tile=16), MatmulPath("blas", 4)), ids=str)
@pytest.mark.parametrize("rows", (1, 5, 16, 40))
def test_padded_rows_and_tiles_compute_the_product(path: MatmulPath, rows: int) -> None:
    from worker_svc.ops.matmul import prepare

    x, w, b = torch.randn(rows, 24), torch.randn(10, 24), torch.randn(10)
    got = matmul(x, prepare(w, b, path))
    assert torch.allclose(got, x @ w.T + b, atol=1e-5)
