"""The fold: in which order the leaves of a row-parallel sum are added, whatever the number of ranks.

K of a row-parallel matmul is cut into L equal slices, the leaves. The fold is a tree fixed by L: an even number of
leaves splits into halves, an odd one is added from the left. A rank holds consecutive leaves; where they are one node
of the tree it sends their sum, else it sends each of them. Invariant: the expression depends on L alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.parallel.group import Group


@dataclass(frozen=True, slots=True)
class LeafPart:
    """Leaves `first .. first + count - 1` of `total`."""

    first: int
    count: int
    total: int

    @property
    def is_node(self) -> bool:
        """Whether these leaves are one node of the tree (and so are every other rank's)."""
        size = self.total
        while size > self.count and size % 2 == 0:
            size //= 2
        return size == self.count or self.count == 1


def leaf_part(total: int, rank: int, tp: int) -> LeafPart:
    assert total % tp == 0, (total, tp)
    return LeafPart(rank * (total // tp), total // tp, total)


def fold(leaves: Sequence[Tensor]) -> Tensor:
    """The sum of all leaves of a node, in the tree's order."""
    n = len(leaves)
    if n == 1:
        return leaves[0]
    if n % 2 == 0:
        return fold(leaves[: n // 2]) + fold(leaves[n // 2 :])
    total = leaves[0]
    for leaf in leaves[1:]:
        total = total + leaf
    return total


def fold_across(leaves: Sequence[Tensor], part: LeafPart, group: Group) -> Tensor:
    """The sum over all ranks' leaves: exchange, then add in order. `leaves`: this rank's, in the accumulator's type."""
    if group.tp == 1:
        return fold(leaves)
    if part.is_node:
        return fold(list(group.all_gather(fold(leaves)).unbind(0)))
    return fold(list(group.all_gather(torch.stack(list(leaves))).flatten(0, 1).unbind(0)))
