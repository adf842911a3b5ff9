"""Attention over the paged cache, one expression for decode, prefill and any chunk of it.

Knows the expression and evaluates it; `attention.py` launches what is here. The expression of a query row at position
p: keys are cut at absolute multiples of SPLIT; in a split an online softmax over steps of STEP keys (loaded as tiles of
TILE), scores and sums in fp32, P rounded to the cache's type, row sums taken as an ordered product of P with a unit
column; then the splits (acc, sums, m) are folded in order, and divided once. Nothing else of a step enters it, so
decode == prefill == any chunking == recompute == cache hit, bit for bit.

Where a compiler might contract a product and a sum or not, the code says fma: every kernel must round alike.
A key tile in which a row sees nothing is an exact no-op: m stays, a = 1, P = 0.

Legend: T tokens, H query heads, K kv heads, G = H / K, D head width, R rows. A layer's cache is [blocks, K, block, D].
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


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
def _open_step(Q, k_desc, k_ptr, v_desc, v_ptr, table, first, h, unit, scale, m, sums, acc, KV_HEADS: tl.constexpr,
               PAGE: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """One step of STEP keys, all seen by every row: one maximum for one or two tiles, keys still added in order."""
    K0 = _load_tile(k_desc, k_ptr, table, first, h, KV_HEADS, PAGE, TILE, D)
    S0 = tl.dot(Q, K0.T)
    if STEP == TILE:
        top = tl.maximum(m, tl.max(S0, 1) * scale)
        a = tl.exp2(m - top)
        P0 = tl.exp2(tl.fma(S0, scale, -top[:, None])).to(K0.dtype)
        V0 = _load_tile(v_desc, v_ptr, table, first, h, KV_HEADS, PAGE, TILE, D)
        sums = tl.dot(P0, unit, sums * a[:, None])
        acc = tl.dot(P0, V0, acc * a[:, None])
    else:
        K1 = _load_tile(k_desc, k_ptr, table, first + TILE, h, KV_HEADS, PAGE, TILE, D)
        S1 = tl.dot(Q, K1.T)
        top = tl.maximum(m, tl.maximum(tl.max(S0, 1), tl.max(S1, 1)) * scale)
        a = tl.exp2(m - top)
        P0 = tl.exp2(tl.fma(S0, scale, -top[:, None])).to(K0.dtype)
        V0 = _load_tile(v_desc, v_ptr, table, first, h, KV_HEADS, PAGE, TILE, D)
        sums = tl.dot(P0, unit, sums * a[:, None])
        acc = tl.dot(P0, V0, acc * a[:, None])
        P1 = tl.exp2(tl.fma(S1, scale, -top[:, None])).to(K0.dtype)
        V1 = _load_tile(v_desc, v_ptr, table, first + TILE, h, KV_HEADS, PAGE, TILE, D)
        sums = tl.dot(P1, unit, sums)
        acc = tl.dot(P1, V1, acc)
    return top, sums, acc


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
def _masked_step(Q, k_desc, k_ptr, v_desc, v_ptr, table, first, h, low, high, end, unit, scale, m, sums, acc,
                 KV_HEADS: tl.constexpr, PAGE: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr,
                 D: tl.constexpr):  # fmt: skip
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
    sums = tl.dot(P0, unit, sums * a[:, None])
    acc = tl.dot(P0, V0, acc * a[:, None])
    if STEP != TILE:
        P1 = tl.exp2(tl.fma(S1, scale, -safe[:, None])).to(unit.dtype)
        V1 = _masked_values(v_desc, v_ptr, table, first + TILE, h, end, KV_HEADS, PAGE, TILE, D)
        sums = tl.dot(P1, unit, sums)
        acc = tl.dot(P1, V1, acc)
    return top, sums, acc


@triton.jit
def _fold(M, L, ACC, m, sums, acc):
    """Add a split to what is folded so far; a split in which the row sees nothing changes nothing."""
    top = tl.maximum(M, m)
    safe = tl.where(top > float("-inf"), top, 0.0)
    a = tl.exp2(M - safe)
    w = tl.exp2(m - safe)
    seen = m > float("-inf")
    L = tl.where(seen, tl.fma(sums, w, L * a), L)
    ACC = tl.where(seen[:, None], tl.fma(acc, w[:, None], ACC * a[:, None]), ACC)
    return top, L, ACC


@triton.jit
def plan_kernel(lengths, rows_ptr, slots, state, state_stride, slot_rows, starts, work_row, work_split, work_item,
                count, WINDOW: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
                SHARED: tl.constexpr, SHARED_COLUMN: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """The flat list of a step's (row, split) work. Program r writes row r's part; rows of length 0 take no part.

    Partial results of a row lie at starts[row], .., one for each of its splits, also for those that a group reads:
    they are not in this list when SHARED.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    r = tl.program_id(0)
    n = tl.load(rows_ptr)
    row = tl.arange(0, ROWS)
    length = tl.load(lengths + row, mask=row < n, other=0)
    slot = tl.load(slots + row, mask=row < n, other=0)
    if WINDOW:
        skipped = tl.maximum(length - WINDOW, 0) // SPLIT
    else:
        skipped = length * 0
    splits = (length + SPLIT - 1) // SPLIT - skipped
    shared = length * 0
    if SHARED:
        shared = tl.load(
            state + slot.to(tl.int64) * state_stride + SHARED_COLUMN, mask=(row < n) & (length > 0), other=0
        )
    start = tl.sum(tl.where(row < r, splits, 0))
    work = tl.sum(tl.where(row < r, splits - shared, 0))
    mine = tl.sum(tl.where(row == r, splits - shared, 0))
    first = tl.sum(tl.where(row == r, skipped + shared, 0))
    ahead = tl.sum(tl.where(row == r, shared, 0))
    tl.store(starts + r, start)
    if r < n:
        tl.store(slot_rows + tl.load(slots + r), r)
    for s0 in range(0, mine, CHUNK):
        s = s0 + tl.arange(0, CHUNK)
        tl.store(work_row + work + s, r + tl.zeros_like(s), mask=s < mine)
        tl.store(work_split + work + s, first + s, mask=s < mine)
        tl.store(work_item + work + s, start + ahead + s, mask=s < mine)
    if r == tl.num_programs(0) - 1:
        tl.store(starts + r + 1, start + ahead + mine)
        tl.store(count, work + mine)


@triton.jit
def decode_kernel(q, k_desc, v_desc, k_ptr, v_ptr, tables, table_stride, slots, token_of, lengths, work_row, work_split,
                  work_item, count, part_acc, part_l, part_m, scale,
                  KV_HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
                  SPLIT: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr,
                  DEPENDENT: tl.constexpr):  # fmt: skip
    """Persistent over (item, kv head); partial results by item: part_acc [items, H, D], part_l and part_m [items,
    H]."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    items = tl.load(count) * KV_HEADS
    g = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    unit = _unit_column(TILE, k_ptr.dtype.element_ty)
    for w in range(tl.program_id(0), items, tl.num_programs(0)):
        work = w // KV_HEADS
        h = w % KV_HEADS
        row = tl.load(work_row + work)
        split = tl.load(work_split + work)
        item = tl.load(work_item + work)
        length = tl.load(lengths + row)
        token = tl.load(token_of + row).to(tl.int64)
        table = tables + tl.load(slots + row).to(tl.int64) * table_stride
        Q = tl.load(q + (token * KV_HEADS * G + h * G + g)[:, None] * D + d[None, :], mask=(g < G)[:, None], other=0.0)
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        sums = tl.zeros([BLOCK_M, 16], tl.float32)
        acc = tl.zeros([BLOCK_M, D], tl.float32)
        low = 0
        begin = split * SPLIT
        end = tl.minimum(begin + SPLIT, length)
        whole = begin + (end - begin) // STEP * STEP
        if WINDOW:
            low = tl.maximum(length - WINDOW, 0)
            whole = begin
        for first in range(begin, whole, STEP):
            m, sums, acc = _open_step(Q, k_desc, k_ptr, v_desc, v_ptr, table, first, h, unit, scale, m, sums, acc,
                                   KV_HEADS, PAGE, STEP, TILE, D)  # fmt: skip
        for first in range(whole, end, STEP):
            m, sums, acc = _masked_step(Q, k_desc, k_ptr, v_desc, v_ptr, table, first, h, low + 0 * g, length + 0 * g,
                                     length, unit, scale, m, sums, acc, KV_HEADS, PAGE, STEP, TILE, D)  # fmt: skip
        to = item.to(tl.int64) * KV_HEADS * G + h * G + g
        tl.store(part_acc + to[:, None] * D + d[None, :], acc, mask=(g < G)[:, None])
        tl.store(part_l + to, tl.sum(sums, 1), mask=g < G)
        tl.store(part_m + to, m, mask=g < G)


@triton.jit
def members_kernel(groups, row_slots, slot_rows, token_of, lengths, rows_ptr, starts, member_tokens, member_items,
                   MEMBERS: tl.constexpr, RECORD: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Program g: of each member of group g its token in this step, -1 if it does not decode, and its first item."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    g = tl.program_id(0)
    n = tl.load(rows_ptr)
    m = tl.arange(0, MEMBERS)
    slot = tl.load(groups + g * RECORD + 1 + m)
    # What `slot_rows` says of a slot may be of an earlier step: only a row that has the slot now counts.
    row = tl.load(slot_rows + tl.maximum(slot, 0))
    here = (slot >= 0) & (row < n)
    here = here & (tl.load(row_slots + row, mask=here, other=-1) == slot)
    here = here & (tl.load(lengths + row, mask=here, other=0) > 0)
    token = tl.load(token_of + row, mask=here, other=0)
    tl.store(member_tokens + g * MEMBERS + m, tl.where(here, token, -1))
    tl.store(member_items + g * MEMBERS + m, tl.load(starts + row, mask=here, other=0))


@triton.jit
def shared_kernel(q, k_desc, v_desc, k_ptr, v_ptr, tables, table_stride, member_tokens, member_items,
                  groups, items, num_items, part_acc, part_l, part_m, scale,
                  KV_HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
                  STEP: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr, MEMBERS: tl.constexpr,
                  RECORD: tl.constexpr, SPLITS: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Splits that several rows share, each read once: row m * G + g of a tile is head g of the group's member m."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.load(num_items) * KV_HEADS
    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    unit = _unit_column(TILE, k_ptr.dtype.element_ty)
    for w in range(tl.program_id(0), total, tl.num_programs(0)):
        packed = tl.load(items + w // KV_HEADS)
        h = w % KV_HEADS
        split = packed % SPLITS
        number = packed // SPLITS
        table = tables + tl.load(groups + number * RECORD + 1).to(tl.int64) * table_stride
        member = number * MEMBERS + tl.minimum(r // G, MEMBERS - 1)
        token = tl.where(r < MEMBERS * G, tl.load(member_tokens + member), -1)
        at = tl.maximum(token, 0).to(tl.int64) * KV_HEADS * G + h * G + r % G
        Q = tl.load(q + at[:, None] * D + d[None, :])  # of some row where there is no member: thrown away
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        sums = tl.zeros([BLOCK_M, 16], tl.float32)
        acc = tl.zeros([BLOCK_M, D], tl.float32)
        for first in range(split * SPLIT, split * SPLIT + SPLIT, STEP):
            m, sums, acc = _open_step(Q, k_desc, k_ptr, v_desc, v_ptr, table, first, h, unit, scale, m, sums, acc,
                                   KV_HEADS, PAGE, STEP, TILE, D)  # fmt: skip
        item = tl.load(member_items + member) + split
        to = item.to(tl.int64) * KV_HEADS * G + h * G + r % G
        tl.store(part_acc + to[:, None] * D + d[None, :], acc, mask=(token >= 0)[:, None])
        tl.store(part_l + to, tl.sum(sums, 1), mask=token >= 0)
        tl.store(part_m + to, m, mask=token >= 0)


@triton.jit
def fold_kernel(part_acc, part_l, part_m, starts, token_of, rows_ptr, out, HEADS: tl.constexpr, D: tl.constexpr,
                WIDTH: tl.constexpr, AHEAD: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Program (row, head, columns): WIDTH columns of the row's splits in order, AHEAD of them loaded at once.

    A split past the last is one in which the row sees nothing.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    h = tl.program_id(1)
    if row < tl.load(rows_ptr):
        start = tl.load(starts + row)
        end = tl.load(starts + row + 1)
        if end > start:
            d = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)[None, :]
            one = tl.arange(0, 1)
            M = tl.full([1], float("-inf"), tl.float32)
            L = tl.zeros([1], tl.float32)
            ACC = tl.zeros([1, WIDTH], tl.float32)
            for first in range(0, end - start, AHEAD):
                accs, sums, ms = (), (), ()
                for i in tl.static_range(AHEAD):
                    at = (start.to(tl.int64) + first + i) * HEADS + h
                    there = first + i + one < end - start
                    accs += (tl.load(part_acc + at * D + d, mask=there[:, None], other=0.0),)  # type: ignore[assignment]
                    sums += (tl.load(part_l + at + one, mask=there, other=0.0),)  # type: ignore[assignment]
                    ms += (tl.load(part_m + at + one, mask=there, other=float("-inf")),)  # type: ignore[assignment]
                for i in tl.static_range(AHEAD):
                    M, L, ACC = _fold(M, L, ACC, ms[i], sums[i], accs[i])
            token = tl.load(token_of + row).to(tl.int64)
            result = (ACC / L[:, None]).to(out.dtype.element_ty)
            tl.store(out + (token * HEADS + h) * D + d, result)


@triton.jit
def prefill_kernel(q, k_desc, v_desc, k_ptr, v_ptr, tables, table_stride, slots, query_starts, first_positions,
                   tile_row, tile_token, count, out, scale,
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
        live = (token < new) & (r // G < BLOCK_M // G)  # G need not divide the tile: its last rows are then nobody's
        position = context + token
        at = (start + token).to(tl.int64) * KV_HEADS * G + h * G + r % G
        Q = tl.load(q + at[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
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
            sums = tl.zeros([BLOCK_M, 16], tl.float32)
            acc = tl.zeros([BLOCK_M, D], tl.float32)
            for first in range(low, low + SPLIT, STEP):
                m, sums, acc = _open_step(Q, k_desc, k_ptr, v_desc, v_ptr, table, first, h, unit, scale, m, sums, acc,
                                       KV_HEADS, PAGE, STEP, TILE, D)  # fmt: skip
            top = tl.maximum(M, m)
            a = tl.exp2(M - top)
            w = tl.exp2(m - top)
            L = tl.fma(tl.sum(sums, 1), w, L * a)
            ACC = tl.fma(acc, w[:, None], ACC * a[:, None])
            M = top
        for low in range(whole, end, SPLIT):
            m = tl.full([BLOCK_M], float("-inf"), tl.float32)
            sums = tl.zeros([BLOCK_M, 16], tl.float32)
            acc = tl.zeros([BLOCK_M, D], tl.float32)
            for first in range(low, tl.minimum(low + SPLIT, end), STEP):
                m, sums, acc = _masked_step(Q, k_desc, k_ptr, v_desc, v_ptr, table, first, h, oldest, position + 1, end,
                                         unit, scale, m, sums, acc, KV_HEADS, PAGE, STEP, TILE, D)  # fmt: skip
            M, L, ACC = _fold(M, L, ACC, m, tl.sum(sums, 1), acc)
        result = ACC / tl.where(L > 0.0, L, 1.0)[:, None]
        tl.store(out + at[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=live[:, None])
