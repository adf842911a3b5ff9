"""Attention over the paged cache, one expression for decode, prefill and any chunk of it.

Knows the expression and the kernels that evaluate it; not who made the work lists. The expression of a query row at
position p: keys are cut at absolute multiples of SPLIT; in a split an online softmax over steps of STEP keys (loaded as tiles of TILE), scores
and sums in fp32, P rounded to the cache's type, row sums taken as an ordered product of P with a unit column; then the
splits (acc, l, m) are folded in order, and divided once. Nothing else of a step enters it, so decode == prefill == any
chunking == recompute == cache hit, bit for bit.

Where a compiler might contract a product and a sum or not, the code says fma: every kernel must round alike.
A key tile in which a row sees nothing is an exact no-op: m stays, a = 1, P = 0.

Legend: T tokens, H query heads, K kv heads, G = H / K, D head width, R rows. The cache of a layer is [blocks, K, block, D].
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from worker_svc.cuda.matmul import prefetch_rows

SPLIT = 256
STEP = 64
TILE = 64
LOG2E = 1.4426950408889634
FEW_BYTES = 20 << 20  # of keys and values of a layer in a step: beyond, memory is busy with them


@triton.jit
def _unit_column(TILE: tl.constexpr, TYPE: tl.constexpr):
    """[TILE, 16]: ones in column 0. The other columns sum zeros, and adding those is exact."""
    column = tl.arange(0, 16)[None, :] + 0 * tl.arange(0, TILE)[:, None]
    return tl.where(column == 0, 1.0, 0.0).to(TYPE)


@triton.jit
def _cache_rows(table, first, h, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Row numbers of keys first .. first + TILE of kv head h in a cache seen as [blocks * K * block, D]."""
    position = first + tl.arange(0, TILE)
    block = tl.load(table + position // PAGE).to(tl.int64)
    return (block * KV_HEADS + h) * PAGE + position % PAGE


@triton.jit
def _load_tile(
    desc, pointer, table, first, h, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr
):
    """[TILE, D] keys or values from position `first`, a multiple of TILE. Tables reach a whole split past the row."""
    if PAGE % TILE == 0:
        block = tl.load(table + first // PAGE)
        return desc.load([(block * KV_HEADS + h) * PAGE + first % PAGE, 0])
    else:
        rows = _cache_rows(table, first, h, KV_HEADS, PAGE, TILE)
        return tl.load(pointer + rows[:, None] * D + tl.arange(0, D)[None, :])


@triton.jit
def _open_step(Q, k_desc, k_ptr, v_desc, v_ptr, table, first, h, unit, scale, m, l, acc, KV_HEADS: tl.constexpr,
               PAGE: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """One step of STEP keys, all seen by every row: one maximum for one or two tiles, keys still added in order."""
    K0 = _load_tile(k_desc, k_ptr, table, first, h, KV_HEADS, PAGE, TILE, D)
    S0 = tl.dot(Q, K0.T)
    if STEP == TILE:
        top = tl.maximum(m, tl.max(S0, 1) * scale)
        a = tl.exp2(m - top)
        P0 = tl.exp2(tl.fma(S0, scale, -top[:, None])).to(K0.dtype)
        V0 = _load_tile(v_desc, v_ptr, table, first, h, KV_HEADS, PAGE, TILE, D)
        l = tl.dot(P0, unit, l * a[:, None])
        acc = tl.dot(P0, V0, acc * a[:, None])
    else:
        K1 = _load_tile(k_desc, k_ptr, table, first + TILE, h, KV_HEADS, PAGE, TILE, D)
        S1 = tl.dot(Q, K1.T)
        top = tl.maximum(m, tl.maximum(tl.max(S0, 1), tl.max(S1, 1)) * scale)
        a = tl.exp2(m - top)
        P0 = tl.exp2(tl.fma(S0, scale, -top[:, None])).to(K0.dtype)
        V0 = _load_tile(v_desc, v_ptr, table, first, h, KV_HEADS, PAGE, TILE, D)
        l = tl.dot(P0, unit, l * a[:, None])
        acc = tl.dot(P0, V0, acc * a[:, None])
        P1 = tl.exp2(tl.fma(S1, scale, -top[:, None])).to(K0.dtype)
        V1 = _load_tile(v_desc, v_ptr, table, first + TILE, h, KV_HEADS, PAGE, TILE, D)
        l = tl.dot(P1, unit, l)
        acc = tl.dot(P1, V1, acc)
    return top, l, acc


@triton.jit
def _masked_tile(Q, desc, pointer, table, first, h, low, high, KV_HEADS: tl.constexpr, PAGE: tl.constexpr,
                 TILE: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Scores of one tile; a row sees keys low .. high (exclusive) of its own."""
    K = _load_tile(desc, pointer, table, first, h, KV_HEADS, PAGE, TILE, D)
    key = first + tl.arange(0, TILE)
    return tl.where((key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]), tl.dot(Q, K.T), float("-inf"))


@triton.jit
def _masked_values(desc, pointer, table, first, h, end, KV_HEADS: tl.constexpr, PAGE: tl.constexpr,
                   TILE: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Values of one tile; 0 where nobody may look, because 0 times NaN is NaN."""
    V = _load_tile(desc, pointer, table, first, h, KV_HEADS, PAGE, TILE, D)
    return tl.where((first + tl.arange(0, TILE) < end)[:, None], V, 0.0)


@triton.jit
def _masked_step(Q, k_desc, k_ptr, v_desc, v_ptr, table, first, h, low, high, end, unit, scale, m, l, acc,
                 KV_HEADS: tl.constexpr, PAGE: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """The same step where rows see keys low .. high of their own; `end` bounds every row's high."""
    S0 = _masked_tile(Q, k_desc, k_ptr, table, first, h, low, high, KV_HEADS, PAGE, TILE, D)
    top = tl.maximum(m, tl.max(S0, 1) * scale)
    if STEP != TILE:
        S1 = _masked_tile(Q, k_desc, k_ptr, table, first + TILE, h, low, high, KV_HEADS, PAGE, TILE, D)
        top = tl.maximum(top, tl.max(S1, 1) * scale)
    safe = tl.where(top > float("-inf"), top, 0.0)
    a = tl.where(top > float("-inf"), tl.exp2(m - safe), 1.0)
    P0 = tl.exp2(tl.fma(S0, scale, -safe[:, None])).to(unit.dtype)
    V0 = _masked_values(v_desc, v_ptr, table, first, h, end, KV_HEADS, PAGE, TILE, D)
    l = tl.dot(P0, unit, l * a[:, None])
    acc = tl.dot(P0, V0, acc * a[:, None])
    if STEP != TILE:
        P1 = tl.exp2(tl.fma(S1, scale, -safe[:, None])).to(unit.dtype)
        V1 = _masked_values(v_desc, v_ptr, table, first + TILE, h, end, KV_HEADS, PAGE, TILE, D)
        l = tl.dot(P1, unit, l)
        acc = tl.dot(P1, V1, acc)
    return top, l, acc


@triton.jit
def _fold(M, L, ACC, m, l, acc):
    """Add a split to what is folded so far; a split in which the row sees nothing changes nothing."""
    top = tl.maximum(M, m)
    safe = tl.where(top > float("-inf"), top, 0.0)
    a = tl.exp2(M - safe)
    w = tl.exp2(m - safe)
    seen = m > float("-inf")
    L = tl.where(seen, tl.fma(l, w, L * a), L)
    ACC = tl.where(seen[:, None], tl.fma(acc, w[:, None], ACC * a[:, None]), ACC)
    return top, L, ACC


@triton.jit
def plan_kernel(lengths, rows_ptr, starts, work_row, work_split, count, WINDOW: tl.constexpr, SPLIT: tl.constexpr,
                ROWS: tl.constexpr, SPLITS: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """The flat (row, split) list of a step. Program r writes row r's part; lengths 0 take no part."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    r = tl.program_id(0)
    n = tl.load(rows_ptr)
    row = tl.arange(0, ROWS)
    length = tl.load(lengths + row, mask=row < n, other=0)
    if WINDOW:
        skipped = tl.maximum(length - WINDOW, 0) // SPLIT
    else:
        skipped = length * 0
    splits = (length + SPLIT - 1) // SPLIT - skipped
    start = tl.sum(tl.where(row < r, splits, 0))
    mine = tl.sum(tl.where(row == r, splits, 0))
    first = tl.sum(tl.where(row == r, skipped, 0))
    tl.store(starts + r, start)
    for s0 in range(0, mine, SPLITS):
        s = s0 + tl.arange(0, SPLITS)
        tl.store(work_row + start + s, r + tl.zeros_like(s), mask=s < mine)
        tl.store(work_split + start + s, first + s, mask=s < mine)
    if r == tl.num_programs(0) - 1:
        tl.store(starts + r + 1, start + mine)
        tl.store(count, start + mine)


@triton.jit
def decode_kernel(q, k_desc, v_desc, k_ptr, v_ptr, tables, table_stride, slots, token_of, lengths, work_row, work_split,
                  count, part_acc, part_l, part_m, scale, next_ptr, next_rows, next_row_bytes,
                  KV_HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
                  SPLIT: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr,
                  NEXT_ROWS: tl.constexpr, NEXT_BYTES: tl.constexpr, FEW_ITEMS: tl.constexpr,
                  DEPENDENT: tl.constexpr):  # fmt: skip
    """Persistent over (item, kv head); partial results by item: part_acc [items, H, D], part_l and part_m [items, H].

    With at most FEW_ITEMS items most programs have nothing to do: L2 is asked for the weights of the next product.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    items = tl.load(count) * KV_HEADS
    if NEXT_BYTES:
        if items <= FEW_ITEMS * KV_HEADS:
            for i in tl.static_range(NEXT_BYTES // 512):
                prefetch_rows(next_ptr, next_row_bytes, tl.program_id(0) * NEXT_ROWS, next_rows, i * 512, NEXT_ROWS, 512)
    g = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    unit = _unit_column(TILE, k_ptr.dtype.element_ty)
    for w in range(tl.program_id(0), items, tl.num_programs(0)):
        item = w // KV_HEADS
        h = w % KV_HEADS
        row = tl.load(work_row + item)
        split = tl.load(work_split + item)
        length = tl.load(lengths + row)
        token = tl.load(token_of + row).to(tl.int64)
        table = tables + tl.load(slots + row).to(tl.int64) * table_stride
        Q = tl.load(q + (token * KV_HEADS * G + h * G + g)[:, None] * D + d[None, :], mask=(g < G)[:, None], other=0.0)
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M, 16], tl.float32)
        acc = tl.zeros([BLOCK_M, D], tl.float32)
        low = 0
        begin = split * SPLIT
        end = tl.minimum(begin + SPLIT, length)
        whole = begin + (end - begin) // STEP * STEP
        if WINDOW:
            low = tl.maximum(length - WINDOW, 0)
            whole = begin
        for first in range(begin, whole, STEP):
            m, l, acc = _open_step(Q, k_desc, k_ptr, v_desc, v_ptr, table, first, h, unit, scale, m, l, acc,
                                   KV_HEADS, PAGE, STEP, TILE, D)  # fmt: skip
        for first in range(whole, end, STEP):
            m, l, acc = _masked_step(Q, k_desc, k_ptr, v_desc, v_ptr, table, first, h, low + 0 * g, length + 0 * g,
                                     length, unit, scale, m, l, acc, KV_HEADS, PAGE, STEP, TILE, D)  # fmt: skip
        to = item.to(tl.int64) * KV_HEADS * G + h * G + g
        tl.store(part_acc + to[:, None] * D + d[None, :], acc, mask=(g < G)[:, None])
        tl.store(part_l + to, tl.sum(l, 1), mask=g < G)
        tl.store(part_m + to, m, mask=g < G)


@triton.jit
def fold_kernel(part_acc, part_l, part_m, starts, token_of, rows_ptr, out, HEADS: tl.constexpr, D: tl.constexpr,
                DEPENDENT: tl.constexpr):  # fmt: skip
    """Program (row, head): the row's splits in order."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    h = tl.program_id(1)
    if row < tl.load(rows_ptr):
        start = tl.load(starts + row)
        end = tl.load(starts + row + 1)
        if end > start:
            d = tl.arange(0, D)
            M = tl.full([1], float("-inf"), tl.float32)
            L = tl.zeros([1], tl.float32)
            ACC = tl.zeros([1, D], tl.float32)
            for i in range(0, end - start):
                at = (start.to(tl.int64) + i) * HEADS + h
                acc = tl.load(part_acc + at * D + d)[None, :]
                l = tl.load(part_l + at + tl.arange(0, 1))
                m = tl.load(part_m + at + tl.arange(0, 1))
                M, L, ACC = _fold(M, L, ACC, m, l, acc)
            token = tl.load(token_of + row).to(tl.int64)
            result = (ACC / L[:, None]).to(out.dtype.element_ty)
            tl.store(out + (token * HEADS + h) * D + d[None, :], result)


@triton.jit
def prefill_kernel(q, k_desc, v_desc, k_ptr, v_ptr, tables, table_stride, slots, query_starts, first_positions, tile_row,
                   tile_token, count, out, scale,
                   KV_HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
                   SPLIT: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr,
                  DEPENDENT: tl.constexpr):  # fmt: skip
    """Program (kv head, tile): BLOCK_M / G tokens x G heads of one row, from token `tile_token` of its new tokens."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(1)
    h = tl.program_id(0)
    if tile < tl.load(count):
        row = tl.load(tile_row + tile)
        token0 = tl.load(tile_token + tile)
        start = tl.load(query_starts + row)
        new = tl.load(query_starts + row + 1) - start
        context = tl.load(first_positions + row)
        table = tables + tl.load(slots + row).to(tl.int64) * table_stride
        r = tl.arange(0, BLOCK_M)
        d = tl.arange(0, D)
        token = token0 + r // G
        position = context + token
        at = (start + token).to(tl.int64) * KV_HEADS * G + h * G + r % G
        Q = tl.load(q + at[:, None] * D + d[None, :], mask=(token < new)[:, None], other=0.0)
        unit = _unit_column(TILE, k_ptr.dtype.element_ty)
        first_row = context + token0
        end = context + tl.minimum(token0 + BLOCK_M // G, new)
        M = tl.full([BLOCK_M], float("-inf"), tl.float32)
        L = tl.zeros([BLOCK_M], tl.float32)
        ACC = tl.zeros([BLOCK_M, D], tl.float32)
        begin = 0
        oldest = 0 * position
        if WINDOW:
            begin = tl.maximum(first_row + 1 - WINDOW, 0) // SPLIT * SPLIT
            whole = begin
            oldest = position + 1 - WINDOW
        else:
            whole = (first_row + 1) // SPLIT * SPLIT  # every row sees every key below
        for low in range(begin, whole, SPLIT):
            m = tl.full([BLOCK_M], float("-inf"), tl.float32)
            l = tl.zeros([BLOCK_M, 16], tl.float32)
            acc = tl.zeros([BLOCK_M, D], tl.float32)
            for first in range(low, low + SPLIT, STEP):
                m, l, acc = _open_step(Q, k_desc, k_ptr, v_desc, v_ptr, table, first, h, unit, scale, m, l, acc,
                                       KV_HEADS, PAGE, STEP, TILE, D)  # fmt: skip
            top = tl.maximum(M, m)
            a = tl.exp2(M - top)
            w = tl.exp2(m - top)
            L = tl.fma(tl.sum(l, 1), w, L * a)
            ACC = tl.fma(acc, w[:, None], ACC * a[:, None])
            M = top
        for low in range(whole, end, SPLIT):
            m = tl.full([BLOCK_M], float("-inf"), tl.float32)
            l = tl.zeros([BLOCK_M, 16], tl.float32)
            acc = tl.zeros([BLOCK_M, D], tl.float32)
            for first in range(low, tl.minimum(low + SPLIT, end), STEP):
                m, l, acc = _masked_step(Q, k_desc, k_ptr, v_desc, v_ptr, table, first, h, oldest, position + 1, end,
                                         unit, scale, m, l, acc, KV_HEADS, PAGE, STEP, TILE, D)  # fmt: skip
            M, L, ACC = _fold(M, L, ACC, m, tl.sum(l, 1), acc)
        result = ACC / tl.where(L > 0.0, L, 1.0)[:, None]
        tl.store(out + at[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=(token < new)[:, None])


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
    prefill_block_m: int = 64
    prefill_warps: int = 4
    prefill_stages: int = 2


class Rows(Protocol):
    """Device columns of a step that attention reads (int32, see step_state.py)."""

    tables: torch.Tensor  # [slots, blocks] a view of the slot state
    row_slots: torch.Tensor
    query_starts: torch.Tensor
    first_positions: torch.Tensor
    decode_lengths: torch.Tensor  # keys of rows with one new token, else 0
    num_rows: torch.Tensor  # [1]
    tile_rows: torch.Tensor
    tile_tokens: torch.Tensor
    num_tiles: torch.Tensor  # [1]


class Work:
    """The decode work list of a step and room for its partial results; one for a runner, used layer after layer."""

    def __init__(self, shape: Shape, max_rows: int, max_len: int, device: torch.device | str) -> None:
        self.max_splits = -(-max_len // SPLIT)
        items = max_rows * self.max_splits
        integers = {"dtype": torch.int32, "device": device}
        self.starts = torch.zeros(max_rows + 1, **integers)
        self.work_row = torch.zeros(items, **integers)
        self.work_split = torch.zeros(items, **integers)
        self.count = torch.zeros(1, **integers)
        self.acc = torch.empty(items, shape.heads, shape.head_dim, device=device)
        self.l = torch.empty(items, shape.heads, device=device)
        self.m = torch.empty(items, shape.heads, device=device)


def _options(warps: int, stages: int, dependent: bool) -> dict[str, int | bool]:
    options: dict[str, int | bool] = {"num_warps": warps, "num_stages": stages}
    return options | {"launch_pdl": True} if dependent else options


def plan(shape: Shape, rows: Rows, work: Work, max_rows: int, *, dependent: bool = False) -> None:
    """Fill the work list from rows.decode_lengths; once a step. max_rows: of the launch (its bucket)."""
    plan_kernel[(max_rows,)](
        rows.decode_lengths, rows.num_rows, work.starts, work.work_row, work.work_split, work.count,
        WINDOW=shape.window, SPLIT=SPLIT, ROWS=triton.next_power_of_2(max_rows), SPLITS=64, DEPENDENT=dependent,
        **_options(4, 1, dependent),
    )  # fmt: skip


def _cache_args(shape: Shape, cache: torch.Tensor) -> TensorDescriptor:
    width = shape.head_dim
    return TensorDescriptor(cache, [cache.numel() // width, width], [width, 1], [min(TILE, shape.block_size), width])


def decode(
    shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, work: Work, out: torch.Tensor,
    max_rows: int, tuning: Tuning, *, dependent: bool = False, then: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Attention of the rows with one new token. q, out [T, H, D]; k, v [blocks, K, block, D]; other rows' out is kept.

    then: weights [N, K] in bf16 of the product that follows; L2 is asked for them while there is little to do.
    """
    group = shape.heads // shape.kv_heads
    programs = tuning.decode_programs if q.is_cuda else 3
    following = q if then is None else then
    next_rows = triton.next_power_of_2(triton.cdiv(following.shape[0], programs))
    decode_kernel[(programs,)](
        q, _cache_args(shape, k), _cache_args(shape, v), k, v, rows.tables, rows.tables.stride(0), rows.row_slots,
        rows.query_starts, rows.decode_lengths, work.work_row, work.work_split, work.count, work.acc, work.l, work.m,
        LOG2E / shape.head_dim**0.5, following, following.shape[0], following.stride(0) * following.element_size(),
        NEXT_ROWS=next_rows, NEXT_BYTES=0 if then is None else then.shape[1] * 2 // 512 * 512,
        FEW_ITEMS=FEW_BYTES // (shape.kv_heads * SPLIT * shape.head_dim * 4),
        KV_HEADS=shape.kv_heads, G=group, D=shape.head_dim, PAGE=shape.block_size, WINDOW=shape.window, SPLIT=SPLIT,
        STEP=STEP, TILE=TILE, BLOCK_M=max(16, triton.next_power_of_2(group)), DEPENDENT=dependent,
        **_options(tuning.decode_warps, tuning.decode_stages, dependent),
    )  # fmt: skip
    fold_kernel[(max_rows, shape.heads)](
        work.acc, work.l, work.m, work.starts, rows.query_starts, rows.num_rows, out,
        HEADS=shape.heads, D=shape.head_dim, DEPENDENT=dependent, **_options(1, 1, dependent),
    )  # fmt: skip


def tile_tokens(shape: Shape, tuning: Tuning) -> int:
    """New tokens of one prefill tile."""
    return tuning.prefill_block_m // (shape.heads // shape.kv_heads)


def prefill(
    shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, out: torch.Tensor, max_tiles: int,
    tuning: Tuning, *, dependent: bool = False,
) -> None:  # fmt: skip
    """Attention of the rows that the tile list names; arguments as for `decode`."""
    prefill_kernel[(shape.kv_heads, max_tiles)](
        q, _cache_args(shape, k), _cache_args(shape, v), k, v, rows.tables, rows.tables.stride(0), rows.row_slots,
        rows.query_starts, rows.first_positions, rows.tile_rows, rows.tile_tokens, rows.num_tiles, out,
        LOG2E / shape.head_dim**0.5,
        KV_HEADS=shape.kv_heads, G=shape.heads // shape.kv_heads, D=shape.head_dim, PAGE=shape.block_size,
        WINDOW=shape.window, SPLIT=SPLIT, STEP=STEP, TILE=TILE, BLOCK_M=tuning.prefill_block_m, DEPENDENT=dependent,
        **_options(tuning.prefill_warps, tuning.prefill_stages, dependent),
    )  # fmt: skip
