"""The Hopper product: its own functions on a model of the machine, and on a GPU the bits of Triton's kernels."""

import importlib.util
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda import gluon_model
from tests.cuda.gluon_model import Barrier, Model, Pointer, Stuck
from worker_svc.cuda import matmul_hopper
from worker_svc.cuda.matmul import Tile, interleave_gate, linear
from worker_svc.cuda.matmul_hopper import Unnormed
from worker_svc.cuda.rows import add_norm_kernel

kernel = pytest.importorskip("worker_svc.cuda.matmul_hopper_kernel")
norm_hopper_kernel = pytest.importorskip("worker_svc.cuda.norm_hopper_kernel")
PANEL = matmul_hopper.PANEL


class Shared(gluon_model.Shared):
    """A window over boxes that lie behind one another in memory may be higher than the first of them."""

    layout = None

    def index(self, i: Any) -> "Shared":
        assert 0 <= int(i) < len(self.data)
        return Shared(self.data[int(i)])

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.data.permute(order))


class Boxes(gluon_model.Descriptor):
    """A tensor map with boxes narrower than its rows; zeros past both edges."""

    def __init__(self, matrix: torch.Tensor, box: list[int]) -> None:
        self.matrix, self.block_shape, self.dtype, self.layout = matrix, box, matrix.dtype, None

    def part(self, at: list[Any]) -> torch.Tensor:
        (row, column), (height, width) = map(int, at), self.block_shape
        return self.matrix[row : row + height, column : column + width]


class Typed(Pointer):
    """Where to store; stands for a pointer's type as well."""

    def __init__(self, tensor: torch.Tensor, offset: Any = 0) -> None:
        super().__init__(tensor, offset)
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)


class Product:
    """An instruction on its way, which reads its operands at the last moment."""

    def __init__(self, ask: Callable[[], torch.Tensor]) -> None:
        self.ask = ask
        self.value: torch.Tensor | None = None


class Machine(Model):
    """Products that stay out over several asks, and results that leave in boxes."""

    def __init__(self, program: int, programs: int) -> None:
        super().__init__(program, programs)
        self.out: list[Product] = []

    def ask(self, a: Shared, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        before = acc

        def compute() -> torch.Tensor:
            value = before.value if isinstance(before, Product) else before
            return a.data.float() @ b.data.float() + value

        self.out.append(Product(compute))
        return self.out[-1]

    def answers(self, num_outstanding: int = 0, deps: tuple[Any, ...] = ()) -> Any:
        while len(self.out) > num_outstanding:
            first = self.out.pop(0)
            first.value = first.ask()
        (acc,) = deps
        return acc.value if isinstance(acc, Product) and acc.value is not None else acc

    def async_copy_global_to_shared(self, desc: Boxes, at: list[Any], barrier: Barrier, to: Shared) -> None:
        found = torch.zeros(desc.block_shape, dtype=desc.dtype)
        part = desc.part(at)
        found[: part.shape[0], : part.shape[1]] = part
        to.data.fill_(float("nan"))

        def arrives() -> None:
            to.data.copy_(found)
            barrier.bytes -= found.numel() * 2
            self._complete(barrier)

        with self.changed:
            barrier.copies.append(arrives)
            self.changed.notify_all()

    def async_copy_shared_to_global(self, desc: Boxes, at: list[Any], box: Shared) -> None:
        part = desc.part(at)
        part.copy_(box.data[: part.shape[0], : part.shape[1]])

    def store_wait(self, pending: int) -> None: ...

    def allocate_shared_memory(self, kind: torch.dtype, shape: list[int], layout: Any) -> Any:
        found = super().allocate_shared_memory(kind, shape, layout)
        return Shared(found.data) if isinstance(found, gluon_model.Shared) else found

    def maximum(self, x: Any, y: Any) -> Any:
        return x if x > y else y

    exp = staticmethod(torch.exp)

    def split(self, pairs: torch.Tensor) -> Any:
        return pairs.unbind(-1)


def run(tile: Tile, n: int, k: int, height: int, rows: int, *, programs: int = 3, gated: bool = False,
        biased: bool = False, boxed: bool = False, normed: bool = False,
        module: types.ModuleType = kernel) -> float:  # fmt: skip
    """The largest error, in units of the largest output. normed: x is left to the kernel to norm."""
    torch.manual_seed(n + k + rows)
    x, w, bias = torch.randn(height, k), torch.randn(n, k) / k**0.5, torch.randn(n)
    update, residual, weight = torch.randn(height, k), torch.randn(height, k), torch.randn(k)
    total = torch.full((height, k), float("nan"))
    left = (Pointer(update.view(-1)), Pointer(residual.view(-1)), Typed(total.view(-1)), Pointer(weight), 1e-5)
    if normed:
        x = torch.nn.functional.rms_norm(update + residual, [k], weight, 1e-5)
    width = n // 2 if gated else n
    out = torch.full((height, width), float("nan"))
    w_boxes = Boxes(w, [matmul_hopper.box(tile), PANEL])
    for program in range(programs):
        Machine(program, programs).run(
            module, "hopper_kernel", Boxes(x, [tile.block_m, PANEL]), w_boxes,
            Boxes(out, [tile.block_m, tile.block_n // (2 if gated else 1)]) if boxed else w_boxes,
            Typed(out.view(-1)), Pointer(bias), Pointer(torch.tensor([rows])), *left,
            n, k, width, -(-n // tile.block_n),
            HEIGHT=tile.block_m, CUT=tile.block_n, WINDOW=matmul_hopper.window(tile), BOX=matmul_hopper.box(tile),
            BLOCK_K=tile.block_k, STAGES=tile.stages, GROUP=tile.group_m, ONE=height <= tile.block_m,
            WARPS=tile.warps, GATED=gated, BIASED=biased, BOXED=boxed, NORMED=k if normed else 0,
            LIVE=height if normed else 0, DEPENDENT=False, LATE=False,
        )  # fmt: skip
    want = x @ w.T + (bias if biased else 0.0)
    if gated:
        gate, up = want.view(height, -1, 2, 8).transpose(1, 2).reshape(height, 2, -1).unbind(1)
        want = gate * torch.sigmoid(gate) * up
    if normed:
        assert torch.equal(total[:rows], (update + residual)[:rows]) and total[rows:].isnan().all()
    if not boxed:
        assert out[rows:].isnan().all(), "rows past the count were written"
    assert out[:rows].isfinite().all()
    return float((out[:rows] - want[:rows]).abs().max() / want.abs().max())


def hopper(block_m: int, block_n: int, block_k: int, stages: int, warps: int = 4, group_m: int = 8) -> Tile:
    return Tile(block_m, block_n, block_k, stages, warps, group_m=group_m, kind="hopper")


@pytest.mark.parametrize("cut", [8, 16, 24, 32, 48, 64, 96, 192])
@pytest.mark.parametrize("height", [1, 7, 8])
def test_tiles_of_any_height_are_right_for_few_rows(cut: int, height: int) -> None:
    assert run(hopper(8, cut, 128, 3), 3 * cut + 16, 448, height, max(1, height - 1)) < 1e-5


@pytest.mark.parametrize("boxed", [False, True])
@pytest.mark.parametrize("group", [1, 2, 8])
def test_rows_in_several_tiles_are_right_however_tiles_are_grouped(boxed: bool, group: int) -> None:
    assert run(hopper(16, 64, 64, 3, group_m=group), 208, 192, 70, 50, boxed=boxed) < 1e-5


@pytest.mark.parametrize(("cut", "boxed"), [(16, False), (48, False), (64, False), (64, True), (192, False)])
def test_a_gated_product_is_silu_times_up(cut: int, boxed: bool) -> None:
    assert run(hopper(8, cut, 128, 4), 208, 320, 8, 5, gated=True, boxed=boxed) < 1e-5


@pytest.mark.parametrize("boxed", [False, True])
def test_a_bias_is_added(boxed: bool) -> None:
    assert run(hopper(16, 64, 128, 4), 208, 320, 16, 9, biased=True, boxed=boxed) < 1e-5


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("height", "rows"), [(1, 1), (2, 2), (2, 1)])
@pytest.mark.parametrize("columns", [1024, 2048])
def test_a_product_norms_its_rows(columns: int, height: int, rows: int, gated: bool) -> None:
    tile = matmul_hopper.norming(hopper(8, 48, 256, 8), columns)
    assert tile is not None and matmul_hopper.norming(hopper(16, 48, 256, 8), columns) is None
    assert run(tile, 208, columns, height, rows, gated=gated, normed=True) < 1e-5


@pytest.mark.parametrize("seed", range(12))
def test_no_ring_gets_stuck_or_is_read_early(seed: int) -> None:
    draw = random.Random(seed)
    tile = hopper(8, draw.choice([8, 24, 64]), draw.choice([64, 128, 256]), draw.randint(2, 8))
    n, k, height = 16 * draw.randint(1, 14), 64 * draw.randint(1, 12), draw.randint(1, 20)
    assert run(tile, n, k, height, draw.randint(1, height), programs=draw.choice([1, 2, 5, 9])) < 1e-5


MUTANTS = {
    "a slot is given back while it is read": ("(t + STAGES - 1) % STAGES), pred=t > 0", "t % STAGES)"),
    "phases of empty slots are off by one": ("(t // STAGES + 1) & 1", "(t // STAGES) & 1"),
    "phases of filled slots are off by one": ("(t // STAGES) & 1)\n            for p", "1)\n            for p"),
    "one more product may be out": ("warpgroup_mma_wait(PANELS,", "warpgroup_mma_wait(2 * PANELS,"),
    "nothing behind the ring": ("(CUT // BOX) + SPARE, BOX", "(CUT // BOX), BOX"),
    "tiles overlap": (
        "tile, row_tiles, column_tiles, GROUP)\n        m0",
        "0, row_tiles, column_tiles, GROUP)\n        m0",
    ),
}


NORM_MUTANTS = {
    "rows that follow the wrong row": ("(0, 4, 3, 2, 1)", "(0, 2, 3, 4, 1)"),
    "columns in another order": ("(2, 0, 1, 3)", "(0, 2, 1, 3)"),
    "the sum is not noted": ("gl.program_id(0) == 0", "gl.program_id(0) < 0"),
    "the second row is the first": ("total, 1, rows", "total, 0, rows"),
    "nothing is added": ("    x += gl.load(residual", "    gl.load(residual"),
}


@pytest.mark.parametrize("name", NORM_MUTANTS)
def test_a_broken_norm_is_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = NORM_MUTANTS[name]
    broken = load_changed(Path(norm_hopper_kernel.__file__), tmp_path, old, new)
    monkeypatch.setattr(kernel, "columns", broken.columns)
    monkeypatch.setattr(kernel, "norm_rows", broken.norm_rows)
    try:
        right = run(hopper(8, 48, 256, 3), 208, 4096, 2, 2, normed=True) < 1e-5
    except AssertionError:
        right = False
    assert not right


def load_changed(path: Path, folder: Path, old: str, new: str) -> types.ModuleType:
    text = path.read_text()
    assert old in text
    (folder / "broken.py").write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location("broken", folder / "broken.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_kernel_is_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon_model, "PATIENCE_S", 0.5)
    module = load_changed(Path(kernel.__file__), tmp_path, *MUTANTS[name])
    tile = hopper(8, 24, 128, 3)
    try:
        right = run(tile, 160, 1088, 8, 8, programs=2, module=module) < 1e-5
    except (Stuck, AssertionError, RuntimeError):
        right = False
    assert not right


def test_a_tile_fits_what_its_facts_say() -> None:
    for cut in (8, 24, 48, 64, 192):
        tile = hopper(8, cut, 128, 4)
        assert cut % matmul_hopper.box(tile) == 0 and matmul_hopper.box(tile) >= 8
        assert matmul_hopper.window(tile) >= max(64, cut)
        assert (matmul_hopper.window(tile) - cut) % matmul_hopper.box(tile) == 0
        assert matmul_hopper.registers(tile) * 32 * (tile.warps + 4) <= matmul_hopper.REGISTERS


@pytest.mark.parametrize("gated", [False, True])
def test_where_there_is_no_hopper_its_twin_answers(gated: bool, device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 64, generator=generator).to(device, dtype)
    w = torch.randn(96, 64, generator=generator).to(device, dtype)
    count = torch.tensor([20], dtype=torch.int32, device=device)
    outs = [torch.full((20, 48 if gated else 96), float("nan"), device=device, dtype=dtype) for _ in range(2)]
    tile = hopper(32, 48, 64, 3)
    for out, each in zip(outs, (tile, tile.twin()), strict=True):
        linear(x, interleave_gate(w) if gated else w, out, count, each, gated=gated)
    assert torch.equal(*outs)


@pytest.mark.gpu
@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_on_a_gpu_every_tile_has_the_bits_of_its_twin(gated: bool, dependent: bool) -> None:
    if matmul_hopper.kernel() is None:
        pytest.skip("no Hopper")
    generator = torch.Generator("cuda").manual_seed(0)
    tiles = [
        hopper(8, 16, 512, 4), hopper(8, 48, 128, 6), hopper(16, 32, 256, 4), hopper(64, 192, 64, 3),
        hopper(128, 64, 64, 6), hopper(128, 256, 64, 3, 8), hopper(256, 128, 64, 3, 8),
    ]  # fmt: skip
    for tile in tiles:
        for height in (1, tile.block_m, 300):
            x = torch.randn(height, 1024, generator=generator, device="cuda").bfloat16()
            w = torch.randn(4112, 1024, generator=generator, device="cuda").bfloat16()
            rows = torch.tensor([height], dtype=torch.int32, device="cuda")
            outs = [torch.zeros(height, 2056 if gated else 4112, device="cuda").bfloat16() for _ in range(2)]
            for out, each in zip(outs, (tile, Tile(16, 64, 128, 4, 4)), strict=True):
                linear(x, w, out, rows, each, gated=gated, dependent=dependent)
            assert torch.equal(*outs), (tile, height)


# A sum in another order differs in its last bit, and a norm rounded to bfloat16 shows that in one number of 65,000.
DRAWS = 200


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("columns", matmul_hopper.NORMED_COLUMNS)
def test_on_a_gpu_a_product_that_norms_its_rows_has_the_bits_of_norm_and_product(columns: int, gated: bool) -> None:
    if matmul_hopper.kernel() is None:
        pytest.skip("no Hopper")
    generator = torch.Generator("cuda").manual_seed(columns)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    w, weight = normal(4112, columns), normal(columns)
    draws = [(height, live) for height in matmul_hopper.NORMED_ROWS for live in {1, height}] * DRAWS
    for height, live in draws:
        update, residual = normal(height, columns), normal(height, columns) * 8
        rows = torch.tensor([live], dtype=torch.int32, device="cuda")
        normed, total = torch.zeros_like(update), torch.zeros_like(update)
        add_norm_kernel[(height,)](
            update, residual, total, weight, normed, rows, columns, 1e-6, ADD=True, BLOCK=columns,
            DEPENDENT=False, num_warps=8,
        )  # fmt: skip
        want = torch.zeros(height, 2056 if gated else 4112, device="cuda").bfloat16()
        linear(normed, w, want, rows, Tile(16, 64, 128, 4, 4), gated=gated)
        for tile, late in ((hopper(8, 48, 256, 8), False), (hopper(8, 192, 128, 4), True)):
            norming = matmul_hopper.norming(tile, columns)
            assert norming is not None
            left = Unnormed(update, residual, torch.zeros_like(total), weight, 1e-6)
            out = torch.zeros_like(want)
            assert linear(left, w, out, rows, norming, gated=gated, dependent=True, late=late) == late
            assert torch.equal(left.total, total), (tile, height, live)
            assert torch.equal(out, want), (tile, height, live)
