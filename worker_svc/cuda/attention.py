"""Attention of a step: its work lists and the launches, layer by layer, of the kernels in `attention_kernels.py`.

Knows shapes, launch settings and the buffers of partial results. Does not know who writes a step's columns. SPLIT, STEP
and TILE are part of the numerics version, everything in `Tuning` is free.

Legend: T tokens, H query heads, K kv heads, D head width, R rows. A layer's cache is [blocks, K, block, D].
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from worker_svc.cuda import decode_hopper, prefill_hopper
from worker_svc.cuda.attention_kernels import (
    decode_kernel,
    fold_kernel,
    members_kernel,
    plan_kernel,
    prefill_kernel,
    shared_kernel,
)
from worker_svc.cuda.decode_hopper import Unrotated

SPLIT = 256
STEP = 64
TILE = 64
LOG2E = 1.4426950408889634
SPLITS = 4096  # more than a row can have
MEMBERS = 16  # rows that read a shared split together
SHARED_COLUMN = 7  # of the slot state: splits that the slot's group reads
RECORD = 32  # integers of a group: its number of splits, then its slots, -1 where none


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model and its cache attention depends on. window 0: every earlier key is seen."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the launches are cut; free, like every tile."""

    decode_programs: int = 1056
    decode_warps: int = 2
    decode_stages: int = 3
    fold_ahead: int = 16  # splits asked for at once, and
    fold_width: int = 64  # columns of a program, at up to
    fold_rows: int = 16  # so many rows
    prefill_block_m: int = 64
    prefill_warps: int = 4
    prefill_stages: int = 2
    hopper_prefill: bool = True  # tiles of `prefill_hopper.ROWS` and its kernel, where it fits
    hopper_stages: int = 5
    few_rows_along: bool = False  # norms inside products, rotation inside attention; off: a difference is unexplained
    hopper_decode_rows: int = 8  # steps of up to so many take the kernel of `decode_hopper.py`, where it fits
    hopper_decode_programs: int = 2  # of a multiprocessor
    hopper_decode_stages: int = 6  # tiles of 64 keys or values that a program has room for, at a width of 128
    shared_programs: int = 264
    shared_warps: int = 4
    shared_stages: int = 2


class Rows(Protocol):
    """Device columns of a step that attention reads (int32, see step_state.py)."""

    state: torch.Tensor  # [slots, columns]
    tables: torch.Tensor  # [slots, blocks] a view of the slot state
    row_slots: torch.Tensor
    query_starts: torch.Tensor
    first_positions: torch.Tensor
    decode_lengths: torch.Tensor  # keys of rows with one new token, else 0
    num_rows: torch.Tensor  # [1]
    tile_rows: torch.Tensor
    tile_tokens: torch.Tensor
    num_tiles: torch.Tensor  # [1]
    groups: torch.Tensor  # [groups, RECORD]
    shared_items: torch.Tensor
    num_shared_items: torch.Tensor  # [1]


class Work:
    """The decode work list of a step and room for its partial results; one for a runner, used layer after layer."""

    def __init__(self, shape: Shape, max_rows: int, max_len: int, device: torch.device | str) -> None:
        self.max_splits = -(-max_len // SPLIT)
        items = max_rows * self.max_splits

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.starts = integers(max_rows + 1)
        self.work_row = integers(items)
        self.work_split = integers(items)
        self.work_item = integers(items)
        self.slot_rows = integers(max_rows)
        self.member_tokens = integers(max_rows, MEMBERS)
        self.member_items = integers(max_rows, MEMBERS)
        self.count = integers(1)
        self.acc = torch.empty(items, shape.heads, shape.head_dim, device=device)
        self.sums = torch.empty(items, shape.heads, device=device)
        self.m = torch.empty(items, shape.heads, device=device)


def _options(warps: int, stages: int, dependent: bool) -> dict[str, int | bool]:
    options: dict[str, int | bool] = {"num_warps": warps, "num_stages": stages}
    return options | {"launch_pdl": True} if dependent else options


def plan(shape: Shape, rows: Rows, work: Work, max_rows: int, *, shared: bool = False, dependent: bool = False) -> None:
    """Fill the work list from rows.decode_lengths; once a step. max_rows: of the launch (its bucket).

    shared: leave splits that groups read to `decode_shared`.
    """
    plan_kernel[(max_rows,)](
        rows.decode_lengths, rows.num_rows, rows.row_slots, rows.state, rows.state.stride(0), work.slot_rows,
        work.starts, work.work_row, work.work_split, work.work_item, work.count,
        WINDOW=shape.window, SPLIT=SPLIT, ROWS=triton.next_power_of_2(max_rows), CHUNK=64,
        SHARED=shared, SHARED_COLUMN=SHARED_COLUMN, DEPENDENT=dependent, **_options(4, 1, dependent),
    )  # fmt: skip
    if shared:
        members_kernel[(len(rows.groups),)](
            rows.groups, rows.row_slots, work.slot_rows, rows.query_starts, rows.decode_lengths, rows.num_rows,
            work.starts, work.member_tokens, work.member_items,
            MEMBERS=MEMBERS, RECORD=RECORD, DEPENDENT=dependent, **_options(1, 1, dependent),
        )  # fmt: skip


def _cache_args(shape: Shape, cache: torch.Tensor) -> TensorDescriptor:
    width = shape.head_dim
    return TensorDescriptor(cache, [cache.numel() // width, width], [width, 1], [min(TILE, shape.block_size), width])


def _decode_on_hopper(shape: Shape, dtype: torch.dtype, max_rows: int, tuning: Tuning) -> bool:
    return max_rows <= tuning.hopper_decode_rows and dtype.itemsize == 2 and decode_hopper.fits(shape)


def rotates(shape: Shape, dtype: torch.dtype, max_rows: int, tuning: Tuning) -> bool:
    """Whether `decode` of so many rows takes them `Unrotated`."""
    fits = _decode_on_hopper(shape, dtype, max_rows, tuning) and decode_hopper.can_rotate(shape, dtype)
    return tuning.few_rows_along and fits


def decode(
    shape: Shape, q: torch.Tensor | Unrotated, k: torch.Tensor, v: torch.Tensor, rows: Rows, work: Work,
    out: torch.Tensor, max_rows: int, tuning: Tuning, *, dependent: bool = False, early: bool = False,
) -> None:  # fmt: skip
    """Attention of the rows with one new token. q, out [T, H, D]; k, v [blocks, K, block, D]; other rows' out is
    kept. Where `rotates` says so q may be `Unrotated`, and every row of it has one new token.

    early: with `dependent`; lists, tables and older keys were there before the kernel before this one began.
    """
    if isinstance(q, Unrotated) or _decode_on_hopper(shape, q.dtype, max_rows, tuning):
        scale = LOG2E / shape.head_dim**0.5
        decode_hopper.decode(shape, q, k, v, rows, work, scale, SPLIT, tuning, dependent=dependent, early=early)
        fold(shape, rows, work, out, max_rows, tuning, dependent=dependent)
        return
    group = shape.heads // shape.kv_heads
    programs = tuning.decode_programs if q.is_cuda else 3
    decode_kernel[(programs,)](
        q, _cache_args(shape, k), _cache_args(shape, v), k, v, rows.tables, rows.tables.stride(0), rows.row_slots,
        rows.query_starts, rows.decode_lengths, work.work_row, work.work_split, work.work_item, work.count,
        work.acc, work.sums, work.m,
        LOG2E / shape.head_dim**0.5,
        KV_HEADS=shape.kv_heads, G=group, D=shape.head_dim, PAGE=shape.block_size, WINDOW=shape.window, SPLIT=SPLIT,
        STEP=STEP, TILE=TILE, BLOCK_M=max(16, triton.next_power_of_2(group)), DEPENDENT=dependent,
        **_options(tuning.decode_warps, tuning.decode_stages, dependent),
    )  # fmt: skip
    fold(shape, rows, work, out, max_rows, tuning, dependent=dependent)


def fold(
    shape: Shape, rows: Rows, work: Work, out: torch.Tensor, max_rows: int, tuning: Tuning, *, dependent: bool = False
) -> None:
    """The last part of `decode`: what the splits of a row gave, folded in order. Few rows take more programs each."""
    few = max_rows <= tuning.fold_rows
    width = min(shape.head_dim, tuning.fold_width) if few else shape.head_dim
    fold_kernel[(max_rows, shape.heads, shape.head_dim // width)](
        work.acc, work.sums, work.m, work.starts, rows.query_starts, rows.num_rows, out,
        HEADS=shape.heads, D=shape.head_dim, WIDTH=width, AHEAD=tuning.fold_ahead if few else 1, DEPENDENT=dependent,
        **_options(1, 1, dependent),
    )  # fmt: skip


def decode_shared(
    shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, work: Work, tuning: Tuning, *,
    dependent: bool = False,
) -> None:  # fmt: skip
    """The splits that groups share, before `decode`, which folds them with the rest."""
    group = shape.heads // shape.kv_heads
    shared_kernel[(tuning.shared_programs if q.is_cuda else 3,)](
        q, _cache_args(shape, k), _cache_args(shape, v), k, v, rows.tables, rows.tables.stride(0),
        work.member_tokens, work.member_items, rows.groups, rows.shared_items, rows.num_shared_items,
        work.acc, work.sums, work.m, LOG2E / shape.head_dim**0.5,
        KV_HEADS=shape.kv_heads, G=group, D=shape.head_dim, PAGE=shape.block_size, SPLIT=SPLIT, STEP=STEP, TILE=TILE,
        BLOCK_M=max(16, triton.next_power_of_2(MEMBERS * group)), MEMBERS=MEMBERS, RECORD=RECORD, SPLITS=SPLITS,
        DEPENDENT=dependent, **_options(tuning.shared_warps, tuning.shared_stages, dependent),
    )  # fmt: skip


def _prefill_on_hopper(shape: Shape, tuning: Tuning) -> bool:
    """Which kernel computes prefill: a matter of speed alone, the bits are the same."""
    return tuning.hopper_prefill and prefill_hopper.fits(shape)


def tile_tokens(shape: Shape, tuning: Tuning) -> int:
    """New tokens of one prefill tile."""
    rows = prefill_hopper.ROWS if _prefill_on_hopper(shape, tuning) else tuning.prefill_block_m
    return rows // (shape.heads // shape.kv_heads)


def prefill(
    shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, out: torch.Tensor, max_tiles: int,
    tuning: Tuning, *, dependent: bool = False,
) -> None:  # fmt: skip
    """Attention of the rows that the tile list names; arguments as for `decode`."""
    scale = LOG2E / shape.head_dim**0.5
    block_m, warps = tuning.prefill_block_m, tuning.prefill_warps
    if _prefill_on_hopper(shape, tuning):
        if q.element_size() == 2:
            prefill_hopper.prefill(
                shape, q, k, v, rows, out, max_tiles, scale, SPLIT, tuning, dependent=dependent
            )  # fmt: skip
            return
        block_m, warps = prefill_hopper.ROWS, 8  # the tile list is cut for the other kernel
    prefill_kernel[(shape.kv_heads, max_tiles)](
        q, _cache_args(shape, k), _cache_args(shape, v), k, v, rows.tables, rows.tables.stride(0), rows.row_slots,
        rows.query_starts, rows.first_positions, rows.tile_rows, rows.tile_tokens, rows.num_tiles, out,
        scale,
        KV_HEADS=shape.kv_heads, G=shape.heads // shape.kv_heads, D=shape.head_dim, PAGE=shape.block_size,
        WINDOW=shape.window, SPLIT=SPLIT, STEP=STEP, TILE=TILE, BLOCK_M=block_m, DEPENDENT=dependent,
        **_options(warps, tuning.prefill_stages, dependent),
    )  # fmt: skip
