"""A mixture of experts on CUDA: the buffers of a layer's pass and the launches of the kernels in `moe_kernels.py`.

Knows the layout of prepared experts and which launch is cut how. Does not know layers, ranks or the step. Invariant: as
in `moe_kernels.py` and `moe_route_kernels.py`. PIECE is part of the router's expression; tiles of the products, whether
pairs are grouped at all, and which of three forms a layer takes, are free:

    many tokens       logits, choose, gate and up, down, combine with the next norm
    up to NORM_ROWS   the same, with the norm before taken along by the logits
    ungrouped pairs   the same, and gate and up choose their experts themselves

A launch is bounded by the bucket, not by the step: kernels read the number of tokens and the lengths of the experts'
lists from the device, and tiles past them end at once.

Legend: T tokens of the bucket, S slots, X experts, D hidden width, I this rank's inner width, P = T * S pairs.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from worker_svc.cuda import rows
from worker_svc.cuda.matmul import GATE_GROUP, Tile
from worker_svc.cuda.moe_kernels import combine_kernel, combine_norm_kernel, experts_kernel
from worker_svc.cuda.moe_route_kernels import choose_kernel, logits_kernel, norm_logits_kernel
from worker_svc.cuda.tuning import expert_tile_for

PIECE = 256  # columns of a logit's piece
NORM_ROWS = 32  # tokens whose norm and logits are one launch: each program norms its token again
CHOOSE_WARPS = 4
ROUTE_ROWS, ROUTE_WARPS = 16, 4
SHARED_BYTES = 222 << 10  # for the stages of a router's loop, each a piece
ROUTE_BYTES, ROUTE_STAGES = 32 << 10, 4  # of the router, at most, a stage


@dataclass(frozen=True, slots=True)
class Experts:
    """One layer's experts, prepared. `counts` [X] int32 are the lengths of their lists, zero between passes."""

    gate_up: Tensor  # [X * 2 * I, D], gate and up rows of each expert interleaved (`matmul.py`)
    down: Tensor  # [X * D, I]
    counts: Tensor

    @property
    def number(self) -> int:
        return len(self.counts)


@dataclass(frozen=True, slots=True)
class Routed:
    """What the router decided, or where gate and up note what they choose themselves (`pending`).

    lists: None: pairs are not grouped.
    """

    ids: Tensor  # [T, S] int32
    weights: Tensor  # [T, S] fp32
    lists: Tensor | None  # [X, T] int32
    pending: Tensor | None = None  # [B, T, X] fp32: pieces of logits that nobody has chosen from
    renormalise: bool = False  # of those who choose

    @property
    def slots(self) -> int:
        return self.ids.shape[1]


@dataclass(frozen=True, slots=True)
class Normed:
    """A normed row and its logits, in pieces."""

    x_TD: Tensor
    parts: Tensor  # [B, T, X] fp32


@dataclass(frozen=True, slots=True)
class Answers:
    """A sum that is still to be made: the answers of all pairs [P, D], and what weighs them."""

    values: Tensor
    routed: Routed
    experts: Experts


def prepare(gate_up_XNK: Tensor, down_XDI: Tensor) -> Experts:
    """`gate_up_XNK`: [X, 2 * I, D], each expert's gate rows and then its up rows."""
    experts, height, width = gate_up_XNK.shape
    halves = gate_up_XNK.view(experts, 2, height // (2 * GATE_GROUP), GATE_GROUP, width)
    return Experts(
        halves.transpose(1, 2).reshape(-1, width).contiguous(),
        down_XDI.reshape(-1, down_XDI.shape[2]).contiguous(),
        torch.zeros(experts, dtype=torch.int32, device=down_XDI.device),
    )


def worth_grouping(tokens: int, slots: int, experts: int) -> bool:
    """Few pairs rarely meet in an expert: then each is a tile of its own, and no list is read or made."""
    return 2 * tokens * slots > experts


def logits(x_TD: Tensor, router_XD: Tensor, rows_1: Tensor, *, dependent: bool = False) -> Tensor:
    """[1, T, X] fp32, of at most 256 experts."""
    tokens, width = x_TD.shape
    experts, block_x = len(router_XD), _block(len(router_XD))
    parts = torch.empty(1, tokens, experts, dtype=torch.float32, device=x_TD.device)
    piece_bytes = (ROUTE_ROWS + block_x) * PIECE * x_TD.element_size()
    block_k = min(PIECE, ROUTE_BYTES // (block_x * x_TD.element_size()))
    logits_kernel[(triton.cdiv(tokens, ROUTE_ROWS),)](
        _rows_of(x_TD, ROUTE_ROWS, block_k), _rows_of(router_XD, block_x, block_k), parts, rows_1, width,
        EXPERTS=experts, BLOCK_X=block_x, BLOCK_M=ROUTE_ROWS, BLOCK_K=block_k, PIECE=PIECE, DEPENDENT=dependent,
        **_options(ROUTE_WARPS, min(ROUTE_STAGES, 1 + SHARED_BYTES // piece_bytes), dependent),
    )  # fmt: skip
    return parts


def norm_logits(
    update_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, router_XD: Tensor, rows_1: Tensor,
    *, dependent: bool = False,
) -> tuple[Normed, Tensor]:  # fmt: skip
    """(norm(update + residual) with its logits, update + residual), for at most NORM_ROWS tokens or so."""
    tokens, width = update_TD.shape
    total, out = torch.empty_like(residual_TD), torch.empty_like(residual_TD)
    pieces = triton.cdiv(width, PIECE)
    parts = torch.empty(pieces, tokens, len(router_XD), dtype=torch.float32, device=total.device)
    norm_logits_kernel[(tokens, pieces)](
        update_TD, residual_TD, weight_D, router_XD, total, out, parts, rows_1, width, tokens, eps,
        EXPERTS=len(router_XD), BLOCK_X=_block(len(router_XD)), BLOCK=triton.next_power_of_2(width), PIECE=PIECE,
        DEPENDENT=dependent, **_options(rows.WARPS, 1, dependent),
    )  # fmt: skip
    return Normed(out, parts), total


def choose(
    parts: Tensor, slots: int, counts: Tensor, rows_1: Tensor,
    *, renormalise: bool, grouped: bool, dependent: bool = False,
) -> Routed:  # fmt: skip
    """Experts and weights of each token. counts: as in `Experts`; lists' lengths afterwards, if `grouped`."""
    pieces, tokens, experts = parts.shape
    ids = torch.empty(tokens, slots, dtype=torch.int32, device=parts.device)
    weights = torch.empty(tokens, slots, dtype=torch.float32, device=parts.device)
    lists = torch.empty(experts, tokens, dtype=torch.int32, device=parts.device) if grouped else None
    choose_kernel[(tokens,)](
        parts, ids, weights, counts, ids if lists is None else lists, rows_1, tokens, PIECES=pieces,
        EXPERTS=experts, SLOTS=slots, BLOCK_X=_block(experts), BLOCK_S=triton.next_power_of_2(slots),
        RENORMALISE=renormalise, GROUPED=grouped, LANES=32 * CHOOSE_WARPS, DEPENDENT=dependent,
        **_options(CHOOSE_WARPS, 1, dependent),
    )  # fmt: skip
    return Routed(ids, weights, lists)


def left_to_experts(parts: Tensor, slots: int, *, renormalise: bool) -> Routed:
    """Pairs that are not grouped, of experts that gate and up choose."""
    ids = torch.empty(parts.shape[1], slots, dtype=torch.int32, device=parts.device)
    return Routed(ids, torch.empty(ids.shape, device=parts.device), None, parts, renormalise)


def answer(
    x_TD: Tensor, experts: Experts, routed: Routed, rows_1: Tensor, dtype: torch.dtype,
    *, tiles: tuple[Tile, Tile] | None = None, device_name: str = "", dependent: bool = False,
) -> Answers:  # fmt: skip
    """Each pair's expert applied to its token.

    Args:
        dtype: of the answers.
        tiles: of the two products; None: those of the device's table.
    """
    tokens, width = x_TD.shape
    pairs = tokens * routed.slots
    inner = experts.down.shape[1]
    first, second = tiles or tiles_of(experts, routed, device_name)
    hidden = torch.empty(pairs, inner, dtype=x_TD.dtype, device=x_TD.device)
    values = torch.empty(pairs, width, dtype=dtype, device=x_TD.device)
    product(x_TD, experts.gate_up, hidden, experts, routed, rows_1, first, gated=True, dependent=dependent)
    product(hidden, experts.down, values, experts, routed, rows_1, second, gated=False, dependent=dependent)
    return Answers(values, routed, experts)


def tiles_of(experts: Experts, routed: Routed, device_name: str) -> tuple[Tile, Tile]:
    """The table's tiles of gate and up, and of down."""
    width, inner = experts.gate_up.shape[1], experts.down.shape[1]
    facts = len(routed.ids), experts.number, routed.slots
    return (
        expert_tile_for(device_name, 2 * inner, width, *facts, gated=True),
        expert_tile_for(device_name, width, inner, *facts, gated=False),
    )


def combine(answers: Answers, rows_1: Tensor, dtype: torch.dtype, *, dependent: bool = False) -> Tensor:
    """[T, D] in `dtype`: the weighted sum over slots."""
    tokens, width = len(answers.routed.ids), answers.values.shape[1]
    out = torch.empty(tokens, width, dtype=dtype, device=answers.values.device)
    combine_kernel[(tokens,)](
        answers.values, answers.routed.weights, out, answers.experts.counts, rows_1, width,
        EXPERTS=answers.experts.number, SLOTS=answers.routed.slots, BLOCK_X=_block(answers.experts.number),
        BLOCK=triton.next_power_of_2(width), DEPENDENT=dependent, **_options(rows.WARPS, 1, dependent),
    )  # fmt: skip
    return out


def combine_norm(
    answers: Answers, residual_TD: Tensor, weight_D: Tensor, eps: float, rows_1: Tensor, *, dependent: bool = False
) -> Tensor:
    """The weighted sum, rounded, is added to the residual in place; the residual normed."""
    out = torch.empty_like(residual_TD)
    combine_norm_kernel[(len(out),)](
        answers.values, answers.routed.weights, residual_TD, weight_D, out, answers.experts.counts, rows_1,
        out.shape[1], eps, EXPERTS=answers.experts.number, SLOTS=answers.routed.slots,
        BLOCK_X=_block(answers.experts.number), BLOCK=triton.next_power_of_2(out.shape[1]),
        DEPENDENT=dependent, **_options(rows.WARPS, 1, dependent),
    )  # fmt: skip
    return out


def product(
    x: Tensor, w: Tensor, out: Tensor, experts: Experts, routed: Routed, rows_1: Tensor, tile: Tile,
    *, gated: bool, dependent: bool,
) -> None:  # fmt: skip
    """Gate and up: x [T, D], w [X * 2 * I, D], out [P, I] by rank. Down: x [P, I], w [X * D, I], out [P, D] by pair."""
    n, k = len(w) // experts.number, w.shape[1]
    pairs = routed.ids.numel()
    grouped = routed.lists is not None
    parts = routed.pending if gated else None
    hinted = not gated and not grouped and k >= tile.prefetch_k
    # Of X lists that hold P pairs, at most min(X, P) end in a tile that is not full.
    num_tiles = min(experts.number, pairs) + pairs // tile.block_m if grouped else pairs
    experts_kernel[(num_tiles * triton.cdiv(n, tile.block_n),)](
        x, _rows_of(x, tile.block_m, tile.block_k), _rows_of(w, tile.block_n, tile.block_k), w, out, experts.counts,
        routed.ids if routed.lists is None else routed.lists, routed.ids, routed.weights if parts is None else parts,
        routed.weights, rows_1, n, k, len(routed.ids), num_tiles, PIECES=0 if parts is None else len(parts),
        RENORMALISE=routed.renormalise, EXPERTS=experts.number, SLOTS=routed.slots, BLOCK_X=_block(experts.number),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m, GATED=gated,
        GROUPED=grouped, EVEN_K=k % tile.block_k == 0, PREFETCH_K=tile.prefetch_k if hinted else 0,
        LANES=32 * tile.warps, DEPENDENT=dependent, **_options(tile.warps, tile.stages, dependent),
    )  # fmt: skip


def _rows_of(x: Tensor, height: int, width: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [height, width])


def _block(experts: int) -> int:
    """Width of the router's tile: a product's smallest is 16."""
    return max(16, 1 << (experts - 1).bit_length())


def _options(warps: int, stages: int, dependent: bool) -> dict[str, int | bool]:
    options: dict[str, int | bool] = {"num_warps": warps, "num_stages": stages}
    return options | {"launch_pdl": True} if dependent else options
