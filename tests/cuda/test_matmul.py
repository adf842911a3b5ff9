"""Matrix products: right for every tile, and blind to rows past the count."""

import pytest
import torch

from worker_svc.cuda import tuning
from worker_svc.cuda.matmul import Tile, interleave_gate, linear

TILES = [Tile(16, 32, 32, 2, 2), Tile(64, 32, 64, 2, 4), Tile(64, 64, 32, 2, 4, persistent=True)]


def close(out: torch.Tensor, want: torch.Tensor) -> bool:
    """Relative error of one rounding to the output's type, and of fp32 sums."""
    return float((out.double() - want).norm() / want.norm()) < (5e-3 if out.dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("rows", [1, 17, 70])
def test_a_product_is_right_for_every_tile(tile: Tile, rows: int, device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(72, 96, generator=generator).to(device, dtype)
    w = torch.randn(80, 96, generator=generator).to(device, dtype)
    out = torch.full((72, 80), float("nan"), device=device, dtype=dtype)
    linear(x, w, out, torch.tensor([rows], dtype=torch.int32, device=device), tile)
    assert close(out[:rows], x[:rows].double() @ w.double().T)


@pytest.mark.parametrize("tile", TILES)
def test_a_gated_product_is_the_product_and_then_silu_times_up(tile: Tile, device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 64, generator=generator).to(device, dtype)
    gate_up = torch.randn(128, 64, generator=generator).to(device, dtype) / 8
    out = torch.full((20, 64), float("nan"), device=device, dtype=dtype)
    linear(x, interleave_gate(gate_up), out, torch.tensor([20], dtype=torch.int32, device=device), tile, gated=True)
    gate, up = (x.double() @ gate_up.double().T).chunk(2, 1)
    assert close(out, gate * torch.sigmoid(gate) * up)


def test_a_wrong_interleaving_would_be_seen(device: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    gate_up = torch.randn(128, 64, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    out = torch.empty((4, 64), device=device, dtype=dtype)
    linear(x, gate_up, out, torch.tensor([4], dtype=torch.int32, device=device), TILES[0], gated=True)
    gate, up = (x.double() @ gate_up.double().T).chunk(2, 1)
    assert not close(out, gate * torch.sigmoid(gate) * up)


def test_outputs_of_any_width_are_right(device: str, dtype: torch.dtype) -> None:
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    w = torch.randn(77, 64, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    out = torch.full((20, 77), float("nan"), device=device)
    linear(x, w, out, torch.tensor([20], dtype=torch.int32, device=device), TILES[2])
    assert close(out, x.double() @ w.double().T)


def test_few_rows_that_nobody_tuned_apart_do_as_sixteen_do(monkeypatch: pytest.MonkeyPatch) -> None:
    sixteen, eight = Tile(16, 32, 64, 2, 4), Tile(8, 48, 64, 4, 4, kind="hopper")
    tiles = {"4096x64@16": sixteen, "6144x64@16": sixteen, "6144x64@8": eight}
    monkeypatch.setattr(tuning, "table", lambda _: tiles)
    assert tuning.tile_for("none", 4096, 64, 1) is tuning.tile_for("none", 4096, 64, 16) is sixteen
    assert tuning.tile_for("none", 6144, 64, 8) is eight and tuning.tile_for("none", 6144, 64, 9) is sixteen
    assert tuning.tile_for("none", 128, 64, 1) == tuning.rule(128, 1)
