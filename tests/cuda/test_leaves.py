"""Products in leaves: the same bits whatever the tile, the number of rows, the kernel and the number of ranks."""

import pytest
import torch

from tests.cuda.interpreted import order_products
from worker_svc.cuda import leaf_product
from worker_svc.cuda.leaf_product import LeafTile, apart, fold_rows, folded, plain
from worker_svc.ops.leaves import fold

TILES = [LeafTile(16, 32, 32, 2, 4), LeafTile(64, 32, 64, 3, 4), LeafTile(64, 64, 16, 2, 4, group_m=2)]
ROWS, OUTPUTS = 70, 80


@pytest.fixture(autouse=True)
def ordered(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    if device == "cpu":
        order_products(monkeypatch)


def operands(k: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(k)
    x, w = torch.randn(ROWS + 2, k, generator=generator), torch.randn(OUTPUTS, k, generator=generator)
    bias = torch.randn(OUTPUTS, generator=generator)
    return x.to(device, dtype), w.to(device, dtype), bias.to(device, dtype)


def count(rows: int, device: str) -> torch.Tensor:
    return torch.tensor([rows], dtype=torch.int32, device=device)


@pytest.mark.parametrize("leaves", [1, 3, 4, 6, 8])
def test_a_product_in_leaves_is_right(leaves: int, device: str, dtype: torch.dtype) -> None:
    x, w, bias = operands(32 * leaves, device, dtype)
    want = plain(x, w, leaves, torch.float32, bias)[:ROWS]
    for out in (
        folded(x, w, leaves, count(ROWS, device), torch.float32, bias),
        folded(x, w, leaves, count(ROWS, device), torch.float32, bias, TILES[0]),
    ):
        assert float((out[:ROWS] - want).norm() / want.norm()) < 1e-5


@pytest.mark.parametrize("leaves", [3, 4, 6])
def test_tiles_rows_and_kernels_change_no_bit(leaves: int, device: str, dtype: torch.dtype) -> None:
    x, w, bias = operands(64 * leaves, device, dtype)
    rounded = torch.bfloat16 if device == "cuda" else torch.float16
    sums = [apart(x, w, leaves, count(ROWS, device), tile)[:, :ROWS] for tile in TILES]
    assert all(torch.equal(other, sums[0]) for other in sums[1:])
    want = (fold(list(sums[0])) + bias.float()).to(rounded)
    assert torch.equal(fold_rows(sums[0].contiguous(), rounded, bias), want)
    for tile in TILES:
        assert torch.equal(folded(x, w, leaves, count(ROWS, device), rounded, bias, tile)[:ROWS], want)
        alone = folded(x[5:6].contiguous(), w, leaves, count(1, device), rounded, bias, tile)
        assert torch.equal(alone, want[5:6])


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_ranks_change_no_bit(tp: int, device: str, dtype: torch.dtype) -> None:
    x, w, _ = operands(32 * 8, device, dtype)
    want = folded(x, w, 8, count(ROWS, device), torch.float32)[:ROWS]
    parts = []
    for of_x, of_w in zip(x.chunk(tp, 1), w.chunk(tp, 1), strict=True):
        mine = (of_x.contiguous(), of_w.contiguous(), 8 // tp, count(ROWS, device))
        parts.append(folded(*mine, torch.float32, tile=TILES[1])[:ROWS])
        assert torch.equal(parts[-1], fold(list(apart(*mine)))[:ROWS])
    assert torch.equal(fold(parts), want)


def test_one_sum_over_all_of_k_would_be_seen(device: str, dtype: torch.dtype) -> None:
    x, w, _ = operands(32 * 8, device, dtype)
    rows = count(ROWS, device)
    assert not torch.equal(folded(x, w, 8, rows, torch.float32)[:ROWS], folded(x, w, 1, rows, torch.float32)[:ROWS])


def test_a_leaf_is_a_whole_number_of_instructions() -> None:
    assert leaf_product.can_cut(512, 8) and leaf_product.can_cut(96, 3)
    assert not leaf_product.can_cut(64, 8) and not leaf_product.can_cut(100, 3)
