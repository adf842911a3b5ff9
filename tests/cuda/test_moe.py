"""A mixture of experts is the CPU's, whatever the tiles, the batch and the order in which pairs arrive."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.cuda.interpreted import order_products
from worker_svc.cuda import moe, rows
from worker_svc.cuda.matmul import Tile
from worker_svc.cuda.moe import Answers, Experts, Routed
from worker_svc.cuda.ops import CudaOps
from worker_svc.ops import moe as plain
from worker_svc.ops.base import HeadShape, QKNorm, Router
from worker_svc.ops.cpu import CpuOps
from worker_svc.ops.invariance import probe
from worker_svc.ops.leaves import LeafPart


@pytest.fixture(autouse=True)
def products_in_order(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    if device == "cpu":
        order_products(monkeypatch)


Tiles = tuple[Tile, Tile]
SMALL, WIDE, TALL = Tile(16, 64, 32, 2, 2), Tile(16, 128, 64, 2, 4, group_m=3), Tile(32, 32, 64, 2, 4)
TILES: list[Tiles] = [(SMALL, SMALL), (WIDE, TALL), (TALL, WIDE)]
TOKENS = 21


@dataclass
class Layer:
    """Random experts, as a checkpoint holds them and as the kernels do."""

    router: Tensor  # [X, D]
    gate_up: Tensor  # [X, 2 * I, D]
    down: Tensor  # [X, D, I]
    experts: Experts
    slots: int
    renormalise: bool = False

    def parts(self, x: Tensor, count: int | None = None) -> Tensor:
        return moe.logits(x, self.router, number(count or len(x), x))

    def route(self, x: Tensor, *, grouped: bool, count: int | None = None, parts: Tensor | None = None) -> Routed:
        return moe.choose(
            self.parts(x, count) if parts is None else parts, self.slots, self.experts.counts,
            number(count or len(x), x), renormalise=self.renormalise, grouped=grouped,
        )  # fmt: skip

    def answers(
        self, x: Tensor, *, grouped: bool = True, tiles: Tiles = TILES[0], count: int | None = None,
        parts: Tensor | None = None,
    ) -> Answers:  # fmt: skip
        routed = self.route(x, grouped=grouped, count=count, parts=parts)
        return moe.answer(x, self.experts, routed, number(count or len(x), x), x.dtype, tiles=tiles)

    def run(
        self, x: Tensor, *, grouped: bool = True, tiles: Tiles = TILES[0], count: int | None = None,
        parts: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        answers = self.answers(x, grouped=grouped, tiles=tiles, count=count, parts=parts)
        return moe.combine(answers, number(count or len(x), x), x.dtype)

    def run_few(self, x: Tensor, *, parts: Tensor | None = None, count: int | None = None) -> Tensor:
        """Gate and up choose the experts."""
        rows_1 = number(count or len(x), x)
        routed = moe.left_to_experts(
            self.parts(x, count) if parts is None else parts, self.slots, renormalise=self.renormalise
        )
        return moe.combine(moe.answer(x, self.experts, routed, rows_1, x.dtype, tiles=TILES[2]), rows_1, x.dtype)


def number(n: int, like: Tensor) -> Tensor:
    return torch.tensor([n], dtype=torch.int32, device=like.device)


def make(device: str, dtype: torch.dtype, experts: int = 8, slots: int = 2, width: int = 64, inner: int = 48) -> Layer:
    generator = torch.Generator().manual_seed(experts + slots)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / 8).to(device, dtype)

    router, gate_up, down = draw(experts, width), draw(experts, 2 * inner, width), draw(experts, width, inner)
    return Layer(router, gate_up, down, moe.prepare(gate_up, down), slots)


def inputs(layer: Layer, tokens: int = TOKENS) -> Tensor:
    x = torch.randn(tokens, layer.router.shape[1], generator=torch.Generator().manual_seed(5))
    return x.to(layer.router)


def twin(layer: Layer, x: Tensor) -> Tensor:
    """The CPU's mixture in double precision, [T, D]."""
    ops = CpuOps(torch.float64, probe(torch.float64))
    x, router, gate_up, down = (t.double().cpu() for t in (x, layer.router, layer.gate_up, layer.down))
    experts = ops.prepare_experts(gate_up, down, LeafPart(0, 1, 1))
    ids, weights = plain.choose(x @ router.T, layer.slots, layer.renormalise)
    (total,) = plain.leaf_sums(x, ids, weights, experts, torch.float64)
    return total


def close(out: Tensor, want: Tensor) -> bool:
    error = float((out.double().cpu() - want).norm() / want.norm())
    return error < (2e-2 if out.dtype == torch.bfloat16 else 2e-5)


@pytest.mark.parametrize(("grouped", "renormalise"), [(True, False), (False, True)])
@pytest.mark.parametrize("shape", [(8, 2, 64, 48), (5, 3, 80, 32), (20, 8, 48, 40)], ids=["8", "5", "20"])
def test_it_is_the_cpus_mixture(
    shape: tuple[int, int, int, int], renormalise: bool, grouped: bool, device: str, dtype: torch.dtype
) -> None:
    layer = replace(make(device, dtype, *shape), renormalise=renormalise)
    x = inputs(layer, 40 // layer.slots)
    assert close(layer.run(x, grouped=grouped), twin(layer, x))
    if grouped and layer.slots == 2:
        assert not close(replace(layer, renormalise=not renormalise).run(x), twin(layer, x))


def test_ties_go_to_the_lower_expert(device: str, dtype: torch.dtype) -> None:
    layer = make(device, dtype, experts=20, slots=5)
    layer.router[:] = 0
    layer.router[[7, 3]] = 1
    routed = layer.route(inputs(layer).abs(), grouped=True)
    assert routed.ids.tolist() == [[3, 7, 0, 1, 2]] * TOKENS
    layer.router[:] = -torch.arange(20, device=device).to(dtype)[:, None] * 50  # all but the first underflow
    assert layer.route(inputs(layer).abs(), grouped=False).ids.tolist() == [[0, 1, 2, 3, 4]] * TOKENS


def test_lists_hold_every_pair_once_and_are_empty_again_after_the_sum(device: str, dtype: torch.dtype) -> None:
    layer = make(device, dtype)
    x, live = inputs(layer), TOKENS - 6
    answers = layer.answers(x, count=live)
    counts, lists, ids = layer.experts.counts.tolist(), answers.routed.lists, answers.routed.ids[:live].flatten()
    assert lists is not None and sum(counts) == live * layer.slots
    for expert, count in enumerate(counts):
        assert sorted(lists[expert, :count].tolist()) == torch.nonzero(ids == expert).flatten().tolist()
    moe.combine(answers, number(live, x), dtype)
    assert not layer.experts.counts.any()


@pytest.mark.parametrize("tiles", TILES, ids=["small", "wide then tall", "tall then wide"])
def test_tiles_and_grouping_change_no_bit(tiles: Tiles, device: str, dtype: torch.dtype) -> None:
    layer = make(device, dtype)
    x = inputs(layer)
    want = layer.run(x)
    assert torch.equal(layer.run(x, tiles=tiles), want)
    assert torch.equal(layer.run(x, tiles=tiles, grouped=False), want)


def test_a_token_has_the_same_bits_alone_in_any_batch_and_in_any_order(device: str, dtype: torch.dtype) -> None:
    layer = make(device, dtype)
    x = inputs(layer)
    want = layer.run(x)
    for rows_of in ([5], [20, 5], [*range(20, -1, -1)], [5] * 20, [*range(10, 20)]):
        at = torch.tensor(rows_of, device=device)
        grouped = len(rows_of) > 2
        assert torch.equal(layer.run(x[at].contiguous(), grouped=grouped), want[at]), rows_of
    padded = torch.cat((x, torch.full_like(x, float("nan"))))
    assert torch.equal(layer.run(padded, count=TOKENS)[:TOKENS], want)


def test_the_order_of_arrival_changes_no_bit(device: str, dtype: torch.dtype) -> None:
    """Atomics hand out places in whatever order: shuffle the lists, as another run may."""
    layer = make(device, dtype)
    x = inputs(layer)
    want = layer.run(x)
    routed = layer.route(x, grouped=True)
    assert routed.lists is not None
    for expert, count in enumerate(layer.experts.counts.tolist()):
        routed.lists[expert, :count] = routed.lists[expert, :count].flip(0)
    answers = moe.answer(x, layer.experts, routed, number(TOKENS, x), dtype, tiles=TILES[1])
    assert torch.equal(moe.combine(answers, number(TOKENS, x), dtype), want)


def by_expert(answers: Answers) -> Answers:
    """Slots ascend by expert: what a sum in the order of the experts' lists would add."""
    routed = answers.routed
    order = torch.argsort(routed.ids, 1)
    values = answers.values.view(*routed.ids.shape, -1)
    values = values.gather(1, order[:, :, None].expand_as(values)).flatten(0, 1).contiguous()
    sorted_ = replace(routed, ids=routed.ids.gather(1, order), weights=routed.weights.gather(1, order).contiguous())
    return Answers(values, sorted_, answers.experts)


def last_slot_first(answers: Answers) -> Answers:
    routed = answers.routed
    values = answers.values.view(*routed.ids.shape, -1).flip(1).flatten(0, 1).contiguous()
    return Answers(values, replace(routed, weights=routed.weights.flip(1).contiguous()), answers.experts)


@pytest.mark.parametrize("mutant", [by_expert, last_slot_first])
def test_another_order_of_the_sum_would_be_seen(
    mutant: Callable[[Answers], Answers], device: str, dtype: torch.dtype
) -> None:
    layer = make(device, dtype, experts=20, slots=8)
    x, count = inputs(layer, 5), number(5, layer.router)
    answers = layer.answers(x, tiles=(WIDE, WIDE))
    want = moe.combine(answers, count, torch.float32)
    out = moe.combine(mutant(answers), count, torch.float32)
    assert not torch.equal(out, want) and close(out, want.double().cpu())


def test_experts_by_place_in_the_batch_would_be_seen(device: str, dtype: torch.dtype) -> None:
    """A list that names another token's pairs: the answers are stored under the wrong pair."""
    layer = make(device, dtype)
    x = inputs(layer)
    routed = layer.route(x, grouped=True)
    assert routed.lists is not None
    routed.lists[:] = torch.arange(TOKENS, device=device, dtype=torch.int32)
    answers = moe.answer(x, layer.experts, routed, number(TOKENS, x), dtype, tiles=TILES[0])
    assert not close(moe.combine(answers, number(TOKENS, x), dtype).nan_to_num(0, 0, 0), twin(layer, x))


def test_the_sum_with_the_next_norm_has_the_bits_of_both(device: str, dtype: torch.dtype) -> None:
    layer = make(device, dtype, width=80)
    x, count = inputs(layer), number(TOKENS, inputs(layer))
    residual, scale = torch.randn_like(x), torch.rand_like(x[0]) + 0.5
    update = layer.run(x)
    want, total = torch.empty_like(x), residual.clone()
    rows.add_norm_kernel[(TOKENS,)](
        update, total, total, scale, want, count, 80, 1e-5, ADD=True, BLOCK=128, DEPENDENT=False, num_warps=rows.WARPS
    )
    got = moe.combine_norm(layer.answers(x), residual, scale, 1e-5, count)
    assert torch.equal(got, want) and torch.equal(residual, total)
    assert not layer.experts.counts.any()


@pytest.mark.parametrize(
    ("shape", "pieces", "renormalise"),
    [((8, 2, 64, 48), 1, False), ((20, 8, 48, 40), 3, True), ((5, 3, 80, 32), 2, False)],
    ids=["8", "20", "5"],
)
def test_experts_chosen_by_gate_and_up_are_the_same(
    shape: tuple[int, int, int, int], pieces: int, renormalise: bool, device: str, dtype: torch.dtype
) -> None:
    layer = replace(make(device, dtype, *shape), renormalise=renormalise)
    x = inputs(layer, 5)
    x[2] = float("nan")
    parts = torch.randn(pieces, 5, shape[0], generator=torch.Generator().manual_seed(pieces)).to(device)
    parts[-1, 2] = float("nan")
    want = layer.run(x, parts=parts)
    assert want[2].isnan().all() and not want[3].isnan().any()
    assert torch.equal(layer.run_few(x, parts=parts).nan_to_num(7), want.nan_to_num(7))
    unborn = torch.cat((x, torch.full_like(x[:2], float("nan"))))
    of_unborn = torch.cat((parts, torch.full_like(parts[:, :2], float("nan"))), 1)
    assert torch.equal(layer.run_few(unborn, parts=of_unborn, count=5)[:5].nan_to_num(7), want.nan_to_num(7))
    other = replace(layer, renormalise=not renormalise)
    assert not torch.equal(other.run_few(x, parts=parts).nan_to_num(7), want.nan_to_num(7))


WIDTHS = [(8, 2, 64, 48), (20, 8, 600, 40)]  # the second: three pieces, the last one short


@pytest.mark.parametrize("shape", WIDTHS, ids=["8", "20"])
def test_a_norm_with_its_logits_has_the_bits_of_both(
    shape: tuple[int, int, int, int], device: str, dtype: torch.dtype
) -> None:
    layer = make(device, dtype, *shape)
    update, count, width = inputs(layer), number(TOKENS - 4, layer.router), shape[2]
    residual, scale = torch.randn_like(update), torch.rand_like(update[0]) + 0.5
    before, want, total = residual.clone(), torch.empty_like(update), residual.clone()
    rows.add_norm_kernel[(TOKENS,)](
        update, total, total, scale, want, count, width, 1e-5, ADD=True, BLOCK=1 << (width - 1).bit_length(),
        DEPENDENT=False, num_warps=rows.WARPS,
    )  # fmt: skip
    few, got = moe.norm_logits(update, residual, scale, 1e-5, layer.router, count)
    live = TOKENS - 4
    assert torch.equal(residual, before)
    assert torch.equal(got[:live], total[:live]) and torch.equal(few.x_TD[:live], want[:live])
    one, many = (
        layer.route(want, grouped=False, count=live),
        layer.route(want, grouped=False, count=live, parts=few.parts),
    )
    assert torch.equal(one.ids[:live], many.ids[:live]) and torch.equal(one.weights[:live], many.weights[:live])
    assert len(few.parts) == -(-width // moe.PIECE)


def test_pieces_in_another_order_would_be_seen(device: str, dtype: torch.dtype) -> None:
    layer = make(device, dtype, *WIDTHS[1])
    update, count = inputs(layer), number(TOKENS, layer.router)
    few, _ = moe.norm_logits(update, update, torch.ones_like(update[0]), 1e-5, layer.router, count)
    want = layer.route(update, grouped=False, parts=few.parts).weights
    assert not torch.equal(layer.route(update, grouped=False, parts=few.parts.flip(0).contiguous()).weights, want)


def test_a_row_with_nan_stays_itself_and_harms_no_other(device: str, dtype: torch.dtype) -> None:
    layer = make(device, dtype)
    x = inputs(layer)
    want = layer.run(x)
    x[9] = float("nan")
    for grouped in (True, False):
        out = layer.run(x, grouped=grouped)
        assert out[9].isnan().all()
        assert torch.equal(torch.cat((out[:9], out[10:])), torch.cat((want[:9], want[10:])))


@dataclass
class Recorder:
    """A group in which every peer sends what this rank sends; keeps what was sent."""

    tp: int = 2
    rank: int = 0

    def __post_init__(self) -> None:
        self.sent: list[Tensor] = []

    def all_gather(self, x: Tensor) -> Tensor:
        self.sent.append(x.clone())
        return x.expand(self.tp, *x.shape).contiguous()


def test_ranks_send_parts_that_add_up_to_the_whole(device: str, dtype: torch.dtype) -> None:
    layer = make(device, dtype, experts=8, slots=2, width=64, inner=64)
    x, group = inputs(layer, 6), Recorder()
    ops = CudaOps(dtype, dependent=False)
    ops._num_tokens = number(6, x)
    for rank in range(2):
        own = slice(32 * rank, 32 * rank + 32)
        gate_up = layer.gate_up.view(8, 2, 64, 64)[:, :, own].reshape(8, 64, 64)
        experts = ops.prepare_experts(gate_up, layer.down[:, :, own], LeafPart(rank, 1, 2))
        ops.moe(x, Router(ops.prepare_router(layer.router), 2, renormalise=False), experts, group)  # type: ignore[arg-type]
    assert [part.dtype for part in group.sent] == [torch.float32] * 2
    assert close((group.sent[0] + group.sent[1]).to(dtype), twin(layer, x))


def test_ranks_norm_over_all_heads_as_one_would(device: str, dtype: torch.dtype) -> None:
    """Sums of squares that two ranks exchange are a node of one rank's tree: the same bits."""
    heads, width = 4, 16
    qkv = torch.randn(5, 3 * heads * width, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    ops, group = CudaOps(dtype, dependent=False), Recorder()
    ops._num_tokens = number(5, qkv)
    q, k, v = qkv.chunk(3, 1)
    norm = QKNorm(q[0], k[0], 1e-5)
    for rank in range(2):
        own = torch.cat([t.chunk(2, 1)[rank] for t in (q, k, v)], 1).contiguous()
        ops.full_norms(own, norm, HeadShape(heads // 2, heads // 2, width), LeafPart(rank, 1, 2), group)  # type: ignore[arg-type]
    whole = torch.empty(5, 2, device=device)
    rows.full_squares_kernel[(5,)](
        qkv, whole, number(5, qkv), HEADS=heads, KV_HEADS=heads, D=width, BLOCK_H=4, POWER=2, DEPENDENT=False,
        num_warps=rows.WARPS,
    )  # fmt: skip
    assert torch.equal(group.sent[0] + group.sent[1], whole)
    torch.testing.assert_close(whole[:, 0], q.float().square().sum(1))


@pytest.mark.gpu
def test_every_tile_and_batch_has_the_bits_of_one_pass_at_real_shapes() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    layer = make("cuda", torch.bfloat16, 64, 8, 2048, 1024)
    x = inputs(layer, 600)
    want = layer.run(x, tiles=(Tile(128, 128, 64, 4, 8), Tile(128, 256, 64, 3, 8)))
    for tile in (Tile(16, 32, 256, 4, 4), Tile(32, 64, 128, 4, 4), Tile(64, 64, 128, 4, 4), Tile(128, 64, 64, 4, 4)):
        assert torch.equal(layer.run(x, tiles=(tile, tile)), want), tile
        for first, count in ((0, 1), (17, 2), (100, 16), (300, 256)):
            part = x[first : first + count].contiguous()
            assert torch.equal(layer.run_few(part), want[first : first + count]), (first, count)
            for grouped in (True, False):
                out = layer.run(part, grouped=grouped, tiles=(tile, tile))
                assert torch.equal(out, want[first : first + count]), (tile, first, count, grouped)
