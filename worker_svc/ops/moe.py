"""Mixture of experts on CPU: who is chosen, and in which order their answers are added.

Knows the router's rules and the combination. Invariant: a token's experts, their weights and the order of its sum
depend on that token's router row alone; how many tokens an expert got changes nothing. Over ranks the expression is
    sum over leaves, in the fold's order, of (sum over slots, ascending, of weight x that leaf of the slot's expert).

Legend: T tokens, S slots (experts a token), X experts, D hidden size, L this rank's leaves.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.ops.leaves import LeafPart
from worker_svc.ops.matmul import CpuWeight, gated_matmul, leaf_matmuls, matmul


@dataclass(frozen=True, eq=False, slots=True)
class Experts:
    gate_up: tuple[CpuWeight, ...]  # [X]
    down: tuple[tuple[CpuWeight, ...], ...]  # [X][L], or [X][1] where one weight knows of its leaves
    part: LeafPart


def choose(logits_TX: Tensor, slots: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """(experts [T, S], weights [T, S]): softmax over all experts, the largest first, ties to the lower id."""
    probabilities = torch.softmax(logits_TX, -1)
    ordered, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    weights = ordered[:, :slots]
    if renormalise:
        total = weights[:, 0]
        for slot in range(1, slots):
            total = total + weights[:, slot]
        weights = weights / total.unsqueeze(1)
    return ids[:, :slots], weights


def leaf_sums(x_TD: Tensor, ids_TS: Tensor, weights_TS: Tensor, experts: Experts, acc: torch.dtype) -> list[Tensor]:
    """This rank's leaves of the combined answers, [T, D] each in the accumulator's type."""
    tokens, slots = ids_TS.shape
    flat = ids_TS.reshape(-1)
    answers = [torch.zeros((tokens * slots, x_TD.shape[1]), dtype=acc) for _ in range(experts.part.count)]
    for expert in torch.unique(flat).tolist():
        places = torch.nonzero(flat == expert).view(-1)
        hidden = _gated(x_TD[places // slots], experts.gate_up[expert], acc)
        for answer, leaf in zip(answers, leaf_matmuls(hidden, experts.down[expert], acc), strict=True):
            answer[places] = leaf
    return [combine(answer.view(tokens, slots, -1), weights_TS) for answer in answers]


def combine(answers_TSD: Tensor, weights_TS: Tensor) -> Tensor:
    """Slot after slot."""
    total = answers_TSD[:, 0] * weights_TS[:, :1]
    for slot in range(1, weights_TS.shape[1]):
        total = total + answers_TSD[:, slot] * weights_TS[:, slot : slot + 1]
    return total


def _gated(x: Tensor, weight: CpuWeight, acc: torch.dtype) -> Tensor:
    if weight.packed is not None:
        return gated_matmul(x, weight)
    from worker_svc.ops.invariance import silu_mul

    return silu_mul(matmul(x, weight), acc)
