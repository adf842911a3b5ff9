"""Collectives over shared memory: every rank has the ordered sum, at every size, replayed, and none waits for the dead.

Ranks are processes, as they are on a GPU; where there is none their kernels run under the interpreter, over memory of
the host that they share.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cuda.ranks import together
from worker_svc.cuda.symmetric import Cut, SymmetricGroup
from worker_svc.ops.leaves import LeafPart, fold, leaf_part
from worker_svc.parallel.group import GroupLost

SLOT, PROGRAMS = 1 << 16, 3


def leaves_of(device: torch.device, total: int, *shape: int) -> torch.Tensor:
    """Numbers of many sizes, so that another order has other bits."""
    generator = torch.Generator().manual_seed(total)
    leaves = torch.randn(total, *shape, generator=generator) * 10.0 ** torch.randint(
        -3, 4, (total, *shape), generator=generator
    )
    return leaves.to(device)


def sums(group: SymmetricGroup, device: torch.device) -> None:
    """Sums of every kind, several times over, against `leaves.fold`."""
    tp, rank = group.tp, group.rank
    for total, rows, width, dtype in (
        (tp, 1, 8, torch.float32),
        (2 * tp, 3, 700, torch.float16),
        (3 * tp, 2, 1100, torch.float16),  # of three ranks no node
    ):
        part = leaf_part(total, rank, tp)
        leaves, bias = leaves_of(device, total, rows, width), leaves_of(device, 1, width)[0]
        want = fold(list(leaves))
        own = leaves[part.first : part.first + part.count].contiguous()
        assert torch.equal(group.sum_leaves(own, part, dtype, bias), (want + bias).to(dtype)), (total, rows, width)
        if part.is_node:
            assert torch.equal(group.sum_leaves(fold(list(own))[None], part, dtype), want.to(dtype))


def gathers(group: SymmetricGroup, device: torch.device) -> None:
    for dtype in (torch.float16, torch.int8, torch.int64):
        for shape in ((1,), (3, 5), (7, 1300)):
            mine = [
                (torch.arange(torch.Size(shape).numel(), device=device) * (r + 2) % 113).view(shape).to(dtype)
                for r in range(group.tp)
            ]
            assert torch.equal(group.all_gather(mine[group.rank]), torch.stack(mine)), (dtype, shape)
    group.barrier()


def leaves_alone(group: SymmetricGroup, device: torch.device) -> None:
    """Rank 0 waits for a peer that never comes, until its host aborts."""
    group.barrier()
    if group.rank:
        return
    threading.Timer(0.5, group.abort).start()
    started = time.monotonic()
    group.all_gather(torch.zeros(4, device=device)).cpu()
    with pytest.raises(GroupLost):
        group.check()
    group.all_gather(torch.zeros(4, device=device)).cpu()  # and waits no more
    assert time.monotonic() - started < 20


def replayed(group: SymmetricGroup, device: torch.device) -> None:
    """A captured sum and a captured gather, over new numbers each time."""
    part, leaves = LeafPart(group.rank, 1, group.tp), torch.zeros(1, 3, 700, device=device)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        total = group.sum_leaves(leaves, part, torch.bfloat16)
        return total, group.all_gather(total)

    step()
    group.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total, gathered = step()
    for turn in range(50):
        every = leaves_of(device, group.tp, 3, 700) * (turn + 1)
        leaves.copy_(every[group.rank : group.rank + 1])
        graph.replay()
        want = fold(list(every)).bfloat16()
        assert torch.equal(total, want) and all(torch.equal(part, want) for part in gathered), turn
    group.barrier()


def too_late(group: SymmetricGroup, device: torch.device) -> None:
    """Nobody aborts: the device's own clock ends the wait."""
    group.barrier()
    if group.rank:
        return
    group.all_gather(torch.zeros(4, device=device)).cpu()
    with pytest.raises(GroupLost, match="timeout"):
        group.check()


def right_to_left(group: SymmetricGroup, device: torch.device) -> None:
    """The mutant: what `sums` compares would see another order."""
    leaves = leaves_of(device, group.tp, 2, 500)
    part = LeafPart(group.rank, 1, group.tp)
    got = group.sum_leaves(leaves[group.rank : group.rank + 1].contiguous(), part, torch.float32)
    total = leaves[-1]
    for leaf in leaves.flip(0)[1:]:
        total = total + leaf
    assert torch.equal(got, fold(list(leaves)))
    assert not torch.equal(got, total)


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("twice_from", [1, 1 << 30])
def test_every_rank_has_the_ordered_sum(tp: int, twice_from: int, tmp_path: Path) -> None:
    together(sums, tmp_path, tp, Cut(SLOT, twice_from, PROGRAMS))


def test_a_gather_has_every_ranks_part(tmp_path: Path) -> None:
    together(gathers, tmp_path, 2, Cut(SLOT, programs=PROGRAMS))


def test_nobody_waits_for_the_dead(tmp_path: Path) -> None:
    together(leaves_alone, tmp_path, 2, Cut(SLOT, programs=PROGRAMS))


def test_another_order_would_be_seen(tmp_path: Path) -> None:
    together(right_to_left, tmp_path, 3, Cut(SLOT, programs=PROGRAMS))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs and clocks are a GPU's")
@pytest.mark.parametrize("work", [replayed, too_late])
def test_graphs_are_replayed_and_clocks_end_waits(
    work: Callable[[SymmetricGroup, torch.device], None], tmp_path: Path
) -> None:
    together(work, tmp_path, 2, Cut())
