"""The Hopper decode kernel's own functions on a model of the machine: its ring, its masks and what it computes."""

import importlib.util
import random
import types
from pathlib import Path

import pytest
import torch

from tests.cuda import gluon_model
from tests.cuda.gluon_model import Descriptor, Model, Pointer, Stuck
from tests.cuda.paged import Paged
from worker_svc.cuda.attention import LOG2E, SPLIT, Shape, Tuning, rotates
from worker_svc.cuda.decode_hopper import Unrotated
from worker_svc.cuda.rows import rope_write_kernel

kernel = pytest.importorskip("worker_svc.cuda.decode_hopper_kernel")


def run(lengths: list[int], *, kv_heads: int = 2, group: int = 3, width: int = 64, page: int = 64, window: int = 0,
        stages: int = 6, programs: int = 2, seed: int = 0, fresh: bool = False,
        module: types.ModuleType = kernel) -> float:  # fmt: skip
    """The largest error of the folded result, in units of its largest value. fresh: rotation is left to the kernel."""
    torch.manual_seed(seed)
    heads, rows = kv_heads * group, len(lengths)
    splits = [range(max(0, n - window) // SPLIT if window else 0, -(-n // SPLIT)) for n in lengths]
    per_row = -(-max(lengths) // SPLIT) * SPLIT // page
    blocks = torch.randperm(rows * per_row).int().view(rows, per_row)
    k, v = (torch.randn(rows * per_row, kv_heads, page, width) for _ in range(2))
    for row, n in enumerate(lengths):  # nobody may see what lies behind a row's last key
        flat = torch.arange(n, per_row * page)
        for cache in (k, v):
            cache[blocks[row, flat // page].long(), :, flat % page] = float("nan")
    q = torch.randn(rows, heads, width)
    qkv = torch.randn(rows, heads + 2 * kv_heads, width)
    weights = torch.randn(2, width)
    cosines, sines = torch.randn(2, max(lengths), width // 2)
    caches = [cache.clone() for cache in (k, v)]  # what the kernel is given; k and v are as they must be afterwards
    if fresh:
        last = torch.tensor(lengths) - 1
        place = blocks[torch.arange(rows), last // page].long(), slice(None), last % page
        q = rotated(qkv[:, :heads], weights[0], cosines[last], sines[last])
        k[place] = rotated(qkv[:, heads:-kv_heads], weights[1], cosines[last], sines[last])
        v[place] = qkv[:, -kv_heads:]
    work = [(row, split) for row, of in enumerate(splits) for split in of]
    items = len(work)
    acc = torch.full((items * heads * width,), float("nan"))
    sums, m = torch.full((2, items * heads), float("nan"))

    def column(values: list[int]) -> Pointer:
        return Pointer(torch.tensor(values, dtype=torch.int32))

    for program in range(programs):
        Model(program, programs).run(
            module, "hopper_decode_kernel", Descriptor(q.view(-1, width), 8 if group <= 8 else 16),
            *(Descriptor(cache.view(-1, width), min(64, page)) for cache in caches),
            Pointer(blocks.flatten()), per_row, column(list(range(rows))), column(list(range(rows))), column(lengths),
            column([row for row, _ in work]), column([split for _, split in work]), column(list(range(items))),
            column([items]), Pointer(acc), Pointer(sums), Pointer(m), LOG2E / width**0.5,
            *(Pointer(of.reshape(-1)) for of in (qkv, *weights, cosines, sines, *caches)), 1e-5, 0.0,
            KV_HEADS=kv_heads, G=group, HEADS=8 if group <= 8 else 16, D=width, PAGE=page, WINDOW=window, SPLIT=SPLIT,
            STAGES=stages, FRESH=fresh, CLIP=False, NORM=True, DEPENDENT=False, EARLY=False,
        )  # fmt: skip
    acc, sums, m = acc.view(items, heads, width), sums.view(items, heads), m.view(items, heads)
    error = max(
        float((mine.nan_to_num() - want.nan_to_num()).abs().max()) for mine, want in zip(caches, (k, v), strict=True)
    )
    for row, n in enumerate(lengths):
        mine = [i for i, (of, _) in enumerate(work) if of == row]
        weights = torch.exp2(m[mine] - m[mine].amax(0))
        found = (acc[mine] * weights[..., None]).sum(0) / (sums[mine] * weights).sum(0)[:, None]
        keys, values = (c[blocks[row].long()].transpose(0, 1).reshape(kv_heads, -1, width)[:, :n] for c in (k, v))
        first = max(0, n - window) if window else 0
        scores = q[row].view(kv_heads, group, width) @ keys[:, first:].transpose(1, 2) / width**0.5
        want = (scores.softmax(-1) @ values[:, first:]).view(heads, width)
        assert found.isfinite().all()
        error = max(error, float((found - want).abs().max() / want.abs().max()))
    return error


def rotated(x: torch.Tensor, weight: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Heads [rows, heads, width], normed and rotated."""
    low, high = torch.nn.functional.rms_norm(x, [x.shape[-1]], weight, 1e-5).chunk(2, -1)
    cosines, sines = cosines[:, None], sines[:, None]
    return torch.cat((low * cosines - high * sines, high * cosines + low * sines), -1)


@pytest.mark.parametrize(  # every page with every window and every group
    ("group", "window", "page"),
    [(g, 100 * ((i + j) % 2), page) for i, g in enumerate((1, 4, 6)) for j, page in enumerate((16, 32, 64, 128))],
)
def test_new_tokens_are_rotated_written_and_seen(group: int, window: int, page: int) -> None:
    lengths = [1, 63, 64, 65, 255, 256, 257, 700]
    assert run(lengths, page=page, window=window, group=group, fresh=True, programs=3) < 1e-5


@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("window", [0, 100])
def test_decode_of_odd_lengths_is_right(page: int, window: int) -> None:
    assert run([1, 63, 64, 65, 255, 256, 257, 700], page=page, window=window) < 1e-5


@pytest.mark.parametrize("group", [1, 2, 4, 8, 9, 16])
def test_any_number_of_heads_a_kv_head(group: int) -> None:
    assert run([70, 300], group=group, width=128) < 1e-5


@pytest.mark.parametrize("seed", range(6))
def test_no_ring_and_no_work_list_gets_stuck_or_reads_early(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 900) for _ in range(draw.randint(1, 6))]
    programs, stages = draw.choice([1, 2, 3, 40]), draw.randint(4, 13)
    for fresh in (False, True):
        assert run(lengths, stages=stages, programs=programs, seed=seed, fresh=fresh) < 1e-5


def test_a_ring_too_small_for_a_split_is_seen_to_be_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon_model, "PATIENCE_S", 0.5)
    with pytest.raises(Stuck):
        run([256], stages=3)


MUTANTS = {
    "a producer that does not wait": ("mbarrier.wait(empty.index(slot)", "(empty.index(slot)"),
    "a phase miscounted": ("((t + i) // STAGES + 1) & 1", "((t + i) // STAGES) & 1"),
    "values read early": ("mbarrier.wait(filled.index(slot)", "(filled.index(slot)"),
    "keys read early": ("mbarrier.wait(filled.index(at % STAGES)", "(filled.index(at % STAGES)"),
    "queries read early": ("mbarrier.wait(q_filled", "(q_filled"),
    "keys never given back": ("mbarrier.arrive(empty.index((t + i) % STAGES), pred=i < n)", "pass"),
    "values past the row": ("if seen < TILE", "if seen < 0"),
    "keys past the row": ("left > TILE,", "left > 0,"),
    "steps in another order": ("P, a = (P0, P1, P2, P3)", "P, a = (P1, P0, P2, P3)"),
}


FRESH_MUTANTS = {
    "the new key is not put among the others": (
        "_renew(ring.index(last % STAGES), seen, fresh.index(G), D, False)",
        "pass",
    ),
    "nor the new value": ("_renew(ring.index(slot), seen, fresh.index(G + 1), D, True)", "pass"),
    "key and value exchanged": ("fresh.index(G), D", "fresh.index(G + 1), D"),
    "put a row too far": ("row == seen - 1", "row == seen"),
    "what lies behind stays": ("fresh.index(G + 1), D, True", "fresh.index(G + 1), D, False"),
    "no split writes": ("ends = length - split * SPLIT <= SPLIT", "ends = split < 0"),
    "written elsewhere": ("block, position % PAGE, h", "block, length % PAGE, h"),
    "rotated by the next position": ("position = length - 1", "position = length - 2"),
}


def load_mutant(folder: Path, old: str, new: str) -> types.ModuleType:
    text = Path(kernel.__file__).read_text()
    assert text.count(old) == 1
    path = folder / "mutant.py"
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location("mutant", path)
    assert spec and spec.loader
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    return mutant


@pytest.mark.parametrize("old, new", FRESH_MUTANTS.values(), ids=list(FRESH_MUTANTS))
def test_the_model_sees_new_tokens(old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon_model, "PATIENCE_S", 0.5)
    mutant = load_mutant(tmp_path, old, new)
    with pytest.raises((AssertionError, Stuck)):
        assert run([900, 70], stages=5, programs=1, fresh=True, module=mutant) < 1e-5


@pytest.mark.parametrize("old, new", MUTANTS.values(), ids=list(MUTANTS))
def test_the_model_sees(old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon_model, "PATIENCE_S", 0.5)
    mutant = load_mutant(tmp_path, old, new)
    with pytest.raises((AssertionError, Stuck)):
        assert run([900, 70], stages=5, programs=1, module=mutant) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("clip", [None, 1.5])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(32, 8, 128, 64),
        Shape(16, 8, 128, 64),
        Shape(6, 1, 64, 16),
        Shape(8, 4, 128, 128),
        Shape(8, 2, 128, 32, 100),
    ],
)
def test_on_a_gpu_rows_rotated_along_have_the_bits_of_two_kernels(
    shape: Shape, normed: bool, clip: float | None
) -> None:
    if not rotates(shape, torch.bfloat16, 1, Tuning(few_rows_along=True)):
        pytest.skip("no Hopper")
    heads, width = shape.heads + 2 * shape.kv_heads, shape.head_dim
    generator = torch.Generator("cuda").manual_seed(heads)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device="cuda")

    # Many draws: a head's sum in another order shows in one number of 65,000.
    for lengths in ([1], [64, 65], [700, 256, 257, 1], *[[3, 320, 511, 512, 513, 900, 130, 60]] * 40):
        rows = len(lengths)
        paged = Paged(shape, lengths, "cuda", torch.bfloat16)
        qkv, q_weight, k_weight = (normal(*of).bfloat16() for of in ((rows, heads * width), (width,), (width,)))
        cosines, sines = (normal(1024, width // 2) for _ in range(2))
        numbers = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
        positions = torch.tensor(lengths, dtype=torch.int32, device="cuda") - 1
        k, v = paged.k.clone(), paged.v.clone()
        q = torch.zeros(rows, shape.heads, width, device="cuda").bfloat16()
        rope_write_kernel[(rows, -(-heads // 8))](
            qkv, q_weight, k_weight, cosines, sines, positions, numbers, paged.tables, paged.tables.stride(0), q, k, v,
            numbers[rows:], 1e-6, clip or 0.0, CLIP=clip is not None, HEADS=shape.heads, KV_HEADS=shape.kv_heads,
            D=width, PAGE=shape.block_size, NORM=normed, GROUP=8, DEPENDENT=False, num_warps=4,
        )  # fmt: skip
        want = paged.decode_all(q, k, v, Tuning(hopper_decode_rows=0))
        assert want.isfinite().all()
        for early, dependent in ((False, False), (False, True), (True, True)):
            weights = (q_weight, k_weight) if normed else (None, None)
            fresh = Unrotated(qkv, *weights, 1e-6, clip, cosines, sines)
            my_k, my_v = paged.k.clone(), paged.v.clone()
            out = paged.decode_all(fresh, my_k, my_v, Tuning(), dependent=dependent, early=early)
            assert torch.equal(my_k, k) and torch.equal(my_v, v), (lengths, early, dependent)
            assert torch.equal(out, want), (lengths, early, dependent)
        assert torch.equal(paged.decode_all(q, k, v, Tuning(), dependent=True, early=True), want), lengths
