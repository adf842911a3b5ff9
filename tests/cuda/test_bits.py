"""On a GPU: nothing that tuning, batching, chunking or sharing may choose changes a bit. Run with `pytest -m gpu`."""

import pytest
import torch

from tests.cuda.paged import Paged
from worker_svc.cuda.attention import Shape, Tuning
from worker_svc.cuda.matmul import Tile, interleave_gate, linear
from worker_svc.cuda.tuning import FOLDER, table

pytestmark = pytest.mark.gpu
SHAPES = [Shape(32, 8, 128, 64), Shape(16, 8, 128, 64)]


@pytest.fixture(autouse=True)
def needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.mark.parametrize("gated", [False, True])
def test_every_tuned_tile_gives_the_bits_of_the_first(gated: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(300, 4096, generator=generator, device="cuda").bfloat16()
    w = torch.randn(4096, 4096, generator=generator, device="cuda").bfloat16()
    w = interleave_gate(w) if gated else w
    rows = torch.tensor([300], dtype=torch.int32, device="cuda")
    tables = [table(path.stem) for path in FOLDER.glob("*.json")]
    of_experts = "/"  # tiles of other kernels
    tiles = {
        tile
        for tiles in tables
        for name, tile in tiles.items()
        if of_experts not in name and name.partition("@")[0].endswith("g") == gated
    }
    outs: dict[Tile, torch.Tensor] = {}
    for tile in sorted(tiles, key=repr):
        out = torch.full((300, 2048 if gated else 4096), float("nan"), device="cuda", dtype=torch.bfloat16)
        linear(x, w, out, rows, tile, gated=gated, dependent=True)
        outs[tile] = out
    first = next(iter(outs.values()))
    assert len(outs) > 10 and not [tile for tile, out in outs.items() if not torch.equal(out, first)]


def test_a_row_alone_has_the_bits_of_the_row_among_others() -> None:
    x = torch.randn(70, 1024, device="cuda").bfloat16()
    w = torch.randn(512, 1024, device="cuda").bfloat16()
    whole, one = (torch.empty(n, 512, device="cuda", dtype=torch.bfloat16) for n in (70, 1))
    count = torch.tensor([70, 1], dtype=torch.int32, device="cuda")
    linear(x, w, whole, count[:1], Tile(128, 128, 64, 4, 8, persistent=True))
    linear(x[33:34].contiguous(), w, one, count[1:], Tile(16, 32, 128, 4, 4))
    assert torch.equal(one[0], whole[33])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=["8B", "0.6B"])
def test_decode_has_the_bits_of_prefill(shape: Shape, shared: bool) -> None:
    paged = Paged(shape, [700, 513, 600, 257, 1100, 900], "cuda", torch.bfloat16)
    paged.share([2, 0, 5], 2)
    whole = paged.run([(s, 0, n) for s, n in enumerate(paged.lengths)], Tuning())
    offsets = [sum(paged.lengths[:s]) for s in range(len(paged.lengths))]
    for k in range(30):
        positions = [(s, n - 1 - 7 * k) for s, n in enumerate(paged.lengths)]
        spans = [(s, p, 1) for s, p in positions if p >= (512 if s in (0, 2, 5) else 0)]
        out = paged.run(spans, Tuning(), shared=shared)
        for i, (s, p, _) in enumerate(spans):
            assert torch.equal(out[i], whole[offsets[s] + p]), (s, p)


def test_chunks_and_tile_heights_have_the_bits_of_one_prefill() -> None:
    paged = Paged(SHAPES[0], [700, 513, 64, 257], "cuda", torch.bfloat16)
    full = [(s, 0, n) for s, n in enumerate(paged.lengths)]
    whole = paged.run(full, Tuning())
    for tuning in (Tuning(prefill_block_m=128, prefill_warps=8), Tuning(prefill_block_m=16, prefill_warps=2)):
        assert torch.equal(paged.run(full, tuning), whole)
    chunks = paged.run([(0, 100, 333), (1, 257, 256), (3, 200, 57), (2, 63, 1)], Tuning())
    parts = [(0, 100, 433), (700, 257, 513), (1277, 200, 257), (1213, 63, 64)]
    assert torch.equal(chunks, torch.cat([whole[at + a : at + b] for at, a, b in parts]))
