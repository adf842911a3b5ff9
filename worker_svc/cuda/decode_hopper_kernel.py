# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Decode attention for Hopper, in Gluon: the expression of `attention_kernels.py`, scheduled by hand.

Knows how a program's part of the work list is spread over warps and time: a producer warp walks the list and keeps a
ring of key and value tiles full, across work items, while four warps compute. Does not know who launches it, how many
rows there are, or how splits are folded. Invariant: an element's operations and their order are those of
`attention_kernels.decode_kernel`, so its bits are too; there is no interpreter for Gluon, so that kernel is the plain
twin that tests compare with.

Everything is transposed: keys (and D) are the tall side of a product and the few heads of a kv head the short one, so
that the tensor cores are not fed padding. Scores of a whole split are [SPLIT, HEADS], a few registers a thread, so all
of them are computed before the first value is needed: a split has one reduction over warps, and the online softmax of
its steps is then a chain of values' products alone.

The ring's protocol. An item of n tiles (1 .. SPLIT / TILE) takes 2 n slots in order: its keys, then its values. The
t-th tile of a program lies in slot t % STAGES in that slot's (t // STAGES)-th use. Producer and consumer compute t from
the same list by the same expression. The consumer holds the keys of an item together, so STAGES is at least
SPLIT / TILE. Queries have a ring of two of their own, the u-th item's in slot u % 2. Barriers: `filled` completes a
phase with a tile's bytes, `empty` with the consumer's release; use p of a slot is filled after phase p - 1 of `empty`
(the wait for phase -1 passes at once). Every tile brought is waited for, so nothing is in flight at the end.

FRESH: the new token's queries, key and value are still a row of the qkv product, normed and rotated here, by every item
for itself. The last split's item writes key and value to the cache, and over what tiles were brought in their place.
EARLY: lists, tables and older keys were there before the kernel before this one began, and are read before it ends;
without FRESH only lists and tables, since that kernel writes among the keys.

Legend: T tokens, H query heads, K kv heads, G = H / K, D head width. A layer's cache is [blocks, K, block, D].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker_svc.cuda.prefill_hopper_kernel import rounded_product
from worker_svc.cuda.rotate_hopper_kernel import ROWS, rotated_heads, whole_heads, write_heads

TILE: gl.constexpr = gl.constexpr(64)
TILES: gl.constexpr = gl.constexpr(4)  # of a split
QUERIES: gl.constexpr = gl.constexpr(2)  # slots for queries


@gluon.jit
def _tiles(length, split, SPLIT: gl.constexpr):
    """Tiles of a row's split."""
    return (gl.minimum(length - split * SPLIT, SPLIT) + TILE - 1) // TILE


@gluon.jit
def _bring(desc, rows, ring, filled, empty, t, n, D: gl.constexpr, STAGES: gl.constexpr):
    """Ask for n tiles, the first of them tile t of the ring; rows: of each box in the cache."""
    BOX: gl.constexpr = desc.block_shape[0]
    BOXES: gl.constexpr = TILE // BOX
    for i in gl.static_range(TILES):
        if i < n:
            slot = (t + i) % STAGES
            mbarrier.wait(empty.index(slot), ((t + i) // STAGES + 1) & 1)
            mbarrier.expect(filled.index(slot), TILE * D * 2)
            for j in gl.static_range(BOXES):
                tma.async_copy_global_to_shared(
                    desc, [rows[i * BOXES + j], 0], filled.index(slot), ring.index(slot).slice(j * BOX, BOX, 0)
                )


@gluon.jit
def _of(numbers, w, items, KV_HEADS: gl.constexpr):
    """The list's number of work w; of the last work for what would follow it."""
    return gl.load(numbers + gl.minimum(w, items - 1) // KV_HEADS)


@gluon.jit
def _boxes(tables, table_stride, slot, split, h, KV_HEADS: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr,
           SPLIT: gl.constexpr):  # fmt: skip
    """First row of each box of a split in a cache seen as [blocks * K * block, D]. A table reaches as far."""
    table = tables + slot.to(gl.int64) * table_stride
    rows = ()
    for i in gl.static_range(SPLIT // BOX):
        first = split * SPLIT + i * BOX
        rows += ((gl.load(table + first // PAGE) * KV_HEADS + h) * PAGE + first % PAGE,)  # type: ignore[assignment]
    return rows


@gluon.jit
def _producer(q_desc, k_desc, v_desc, tables, table_stride, slots, token_of, lengths, work_row, work_split, items,
              program, programs, queries, ring, filled, empty, q_filled, q_empty,
              KV_HEADS: gl.constexpr, G: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
              SPLIT: gl.constexpr, STAGES: gl.constexpr, FRESH: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    """Bring what the items program, program + programs, .. need, each tile when its slot is free.

    What leads to an item's pages (row, slot, table) is loaded one and two items ahead, while tiles are waited for.
    """
    BOX: gl.constexpr = k_desc.block_shape[0]
    if program < items:
        t = 0
        u = 0
        row = _of(work_row, program, items, KV_HEADS)
        split = _of(work_split, program, items, KV_HEADS)
        row_1 = _of(work_row, program + programs, items, KV_HEADS)
        split_1 = _of(work_split, program + programs, items, KV_HEADS)
        length = gl.load(lengths + row)
        token = gl.load(token_of + row)
        slot = gl.load(slots + row)
        boxes = _boxes(tables, table_stride, slot, split, program % KV_HEADS, KV_HEADS, PAGE, BOX, SPLIT)
        if EARLY and not FRESH:
            gdc_wait()
        for w in range(program, items, programs):
            length_1 = gl.load(lengths + row_1)
            token_1 = gl.load(token_of + row_1)
            slot_1 = gl.load(slots + row_1)
            row_2 = _of(work_row, w + 2 * programs, items, KV_HEADS)
            split_2 = _of(work_split, w + 2 * programs, items, KV_HEADS)
            n = _tiles(length, split, SPLIT)
            if not FRESH:
                mbarrier.wait(q_empty.index(u % QUERIES), (u // QUERIES + 1) & 1)
                mbarrier.expect(q_filled.index(u % QUERIES), HEADS * D * 2)
                first_head = (token * KV_HEADS + w % KV_HEADS) * G
                tma.async_copy_global_to_shared(
                    q_desc, [first_head, 0], q_filled.index(u % QUERIES), queries.index(u % QUERIES)
                )
            _bring(k_desc, boxes, ring, filled, empty, t, n, D, STAGES)
            h_1 = (w + programs) % KV_HEADS
            boxes_1 = _boxes(tables, table_stride, slot_1, split_1, h_1, KV_HEADS, PAGE, BOX, SPLIT)
            _bring(v_desc, boxes, ring, filled, empty, t + n, n, D, STAGES)
            t += 2 * n
            u += 1
            length, token, boxes, row_1, split, split_1 = length_1, token_1, boxes_1, row_2, split_1, split_2


@gluon.jit
def _scores(Q, ring, filled, at, MMA: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr):
    """Ask for the scores of tile `at` of the ring: [TILE, HEADS]."""
    mbarrier.wait(filled.index(at % STAGES), (at // STAGES) & 1)
    zeros = gl.zeros([TILE, HEADS], gl.float32, MMA)
    return warpgroup_mma(ring.index(at % STAGES), Q, zeros, use_acc=False, is_async=True)


@gluon.jit
def _maxima(a0, a1, a2, a3, b0, b1, b2, b3):
    return gl.maximum(a0, b0), gl.maximum(a1, b1), gl.maximum(a2, b2), gl.maximum(a3, b3)


@gluon.jit
def _step(m, S, largest, scale, P):
    """One step of the online softmax: its P goes to memory. Returns the new maximum and the factor of older sums."""
    top = gl.maximum(m, rounded_product(largest, scale))
    safe = gl.where(top > float("-inf"), top, 0.0)
    a = gl.where(top > float("-inf"), gl.exp2(m - safe), 1.0)
    P.store(gl.exp2(gl.fma(S, scale, -gl.expand_dims(safe, 0))).to(P.dtype))
    return top, a


@gluon.jit
def _clear(V, seen, D: gl.constexpr):
    """Zeros for the values of keys from the `seen`-th on, because 0 times NaN is NaN."""
    B: gl.constexpr = gl.BlockedLayout([1, 8], [2 if D == 128 else 4, 16 if D == 128 else 8], [4, 1], [1, 0])
    values = V.load(B)
    here = gl.expand_dims(gl.arange(0, TILE, gl.SliceLayout(1, B)) < seen, 1)
    V.store(gl.where(here, values, gl.zeros_like(values)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _renew(tile, seen, new, D: gl.constexpr, CLEAR: gl.constexpr):
    """The row before the `seen`-th becomes `new`; CLEAR: those after it become zeros."""
    B: gl.constexpr = gl.BlockedLayout([1, 8], [2 if D == 128 else 4, 16 if D == 128 else 8], [4, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, TILE, gl.SliceLayout(1, B)), 1)
    values = tile.load(B)
    if CLEAR:
        values = gl.where(row < seen, values, gl.zeros_like(values))
    tile.store(gl.where(row == seen - 1, gl.expand_dims(new.load(gl.SliceLayout(0, B)), 0), values))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _values(V, P, ones, a, sums, acc):
    """Add a tile: column sums of P by a product with ones, and its product with the values."""
    sums = warpgroup_mma(ones, P, sums * gl.expand_dims(a, 0), is_async=True)
    acc = warpgroup_mma(V.permute((1, 0)), P, acc * gl.expand_dims(a, 0), is_async=True)
    return warpgroup_mma_wait(0, deps=(sums, acc))


@gluon.jit
def _consumer(tables, table_stride, slots, token_of, lengths, work_row, work_split, work_item, part_acc, part_l,
              part_m, scale, items, program, programs, queries, weights, ring, filled, empty, q_filled, q_empty,
              qkv, q_weight, k_weight, cosines, sines, k_cache, v_cache, epsilon, clip, fresh,
              KV_HEADS: gl.constexpr, G: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
              WINDOW: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr, FRESH: gl.constexpr,
              CLIP: gl.constexpr, NORM: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, MMA)  # a number a head
    gl.static_assert(SPLIT == TILES * TILE)
    ones = gl.full([TILE, TILE], 1.0, ring.dtype, gl.DotOperandLayout(0, MMA, 2))
    tile = gl.arange(0, TILE, gl.SliceLayout(1, MMA))
    d = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(1, MMA)), 1)
    g = gl.arange(0, HEADS, COLUMN)
    if program < items:
        t = 0
        u = 0
        split = _of(work_split, program, items, KV_HEADS)
        item = _of(work_item, program, items, KV_HEADS)
        row = _of(work_row, program, items, KV_HEADS)
        length = gl.load(lengths + row)
        row_1 = _of(work_row, program + programs, items, KV_HEADS)
        if EARLY:
            gdc_wait()
        for w in range(program, items, programs):
            h = w % KV_HEADS
            n = _tiles(length, split, SPLIT)
            length_1 = gl.load(lengths + row_1)
            split_1 = _of(work_split, w + programs, items, KV_HEADS)
            item_1 = _of(work_item, w + programs, items, KV_HEADS)
            row_2 = _of(work_row, w + 2 * programs, items, KV_HEADS)

            ends = length - split * SPLIT <= SPLIT  # with the row's last key
            if FRESH:
                position = length - 1
                token = gl.load(token_of + row)
                low, high = rotated_heads(
                    qkv, q_weight, k_weight, cosines, sines, token, h, position, epsilon, clip,
                    KV_HEADS, G, D, CLIP, NORM,
                )  # fmt: skip
                heads = whole_heads(low, high, D)
                gl.thread_barrier()  # the item before has read what is overwritten now
                queries.index(u % QUERIES).store(heads)
                if ends:
                    fresh._reinterpret(ring.dtype, [ROWS, D], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(heads)
                    slot = gl.load(slots + row).to(gl.int64)
                    block = gl.load(tables + slot * table_stride + position // PAGE)
                    write_heads(low, high, k_cache, v_cache, block, position % PAGE, h, KV_HEADS, G, D, PAGE)
                fence_async_shared()
                gl.thread_barrier()
                if ends:
                    last = t + n - 1
                    mbarrier.wait(filled.index(last % STAGES), (last // STAGES) & 1)
                    seen = length - split * SPLIT - (n - 1) * TILE
                    _renew(ring.index(last % STAGES), seen, fresh.index(G), D, False)
            else:
                mbarrier.wait(q_filled.index(u % QUERIES), (u // QUERIES) & 1)

            # A tile that is not there is the last one again, with keys past the row's last: all of them are masked.
            Q = queries.index(u % QUERIES).permute((1, 0))
            S0 = _scores(Q, ring, filled, t, MMA, HEADS, STAGES)
            S1 = _scores(Q, ring, filled, t + gl.minimum(1, n - 1), MMA, HEADS, STAGES)
            S2 = _scores(Q, ring, filled, t + gl.minimum(2, n - 1), MMA, HEADS, STAGES)
            S3 = _scores(Q, ring, filled, t + gl.minimum(3, n - 1), MMA, HEADS, STAGES)
            S0, S1, S2, S3 = warpgroup_mma_wait(0, deps=(S0, S1, S2, S3))
            if not FRESH:
                mbarrier.arrive(q_empty.index(u % QUERIES))
            for i in gl.static_range(TILES):
                mbarrier.arrive(empty.index((t + i) % STAGES), pred=i < n)

            left = length - split * SPLIT - tile  # keys from this thread's on that the row has
            in0, in1, in2, in3 = left > 0, left > TILE, left > 2 * TILE, left > 3 * TILE
            if WINDOW:
                in0, in1 = in0 & (left <= WINDOW), in1 & (left <= WINDOW + TILE)
                in2, in3 = in2 & (left <= WINDOW + 2 * TILE), in3 & (left <= WINDOW + 3 * TILE)
            S0 = gl.where(gl.expand_dims(in0, 1), S0, float("-inf"))
            S1 = gl.where(gl.expand_dims(in1, 1), S1, float("-inf"))
            S2 = gl.where(gl.expand_dims(in2, 1), S2, float("-inf"))
            S3 = gl.where(gl.expand_dims(in3, 1), S3, float("-inf"))
            x0, x1, x2, x3 = gl.reduce((S0, S1, S2, S3), 0, _maxima)
            P0, P1 = weights.index(0).permute((1, 0)), weights.index(1).permute((1, 0))
            P2, P3 = weights.index(2).permute((1, 0)), weights.index(3).permute((1, 0))
            m, a0 = _step(gl.full([HEADS], float("-inf"), gl.float32, COLUMN), S0, x0, scale, P0)
            m, a1 = _step(m, S1, x1, scale, P1)
            m, a2 = _step(m, S2, x2, scale, P2)
            m, a3 = _step(m, S3, x3, scale, P3)
            fence_async_shared()
            gl.thread_barrier()

            P, a = (P0, P1, P2, P3), (a0, a1, a2, a3)
            sums = gl.zeros([TILE, HEADS], gl.float32, MMA)
            acc = gl.zeros([D, HEADS], gl.float32, MMA)
            for i in gl.static_range(TILES):
                if i < n:
                    slot = (t + n + i) % STAGES
                    mbarrier.wait(filled.index(slot), ((t + n + i) // STAGES) & 1)
                    seen = length - split * SPLIT - i * TILE
                    if FRESH:
                        if ends and i == n - 1:
                            _renew(ring.index(slot), seen, fresh.index(G + 1), D, True)
                    elif seen < TILE:
                        _clear(ring.index(slot), seen, D)
                    sums, acc = _values(ring.index(slot), P[i], ones, a[i], sums, acc)
                    mbarrier.arrive(empty.index(slot))
            t += 2 * n
            u += 1

            to = (item.to(gl.int64) * KV_HEADS + h) * G + g
            here = g < G
            gl.store(part_acc + gl.expand_dims(to * D, 0) + d, acc, mask=gl.expand_dims(here, 0) & (d >= 0))
            first = gl.expand_dims(tile, 1)
            gl.store(part_l + gl.expand_dims(to, 0) + 0 * first, sums, mask=gl.expand_dims(here, 0) & (first == 0))
            gl.store(part_m + to, m, mask=here)
            length, split, item, row, row_1 = length_1, split_1, item_1, row_1, row_2


@gluon.jit
def hopper_decode_kernel(q_desc, k_desc, v_desc, tables, table_stride, slots, token_of, lengths, work_row, work_split,
                         work_item, count, part_acc, part_l, part_m, scale,
                         qkv, q_weight, k_weight, cosines, sines, k_cache, v_cache, epsilon, clip,
                         KV_HEADS: gl.constexpr, G: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr,
                         PAGE: gl.constexpr, WINDOW: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
                         FRESH: gl.constexpr, CLIP: gl.constexpr, NORM: gl.constexpr, DEPENDENT: gl.constexpr,
                         EARLY: gl.constexpr):  # fmt: skip
    """Persistent over (item, kv head) on 4 warps and a producer; results as of `attention_kernels.decode_kernel`.

    HEADS: G rounded up to a product's width, 8 or 16; the columns past G hold other heads and are thrown away.
    FRESH: arguments from qkv on as for `rows.rope_write_kernel`; otherwise they are not read, and q_desc is.
    EARLY: only with DEPENDENT.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    TYPE: gl.constexpr = k_desc.dtype
    SHARED: gl.constexpr = k_desc.layout
    ring = gl.allocate_shared_memory(TYPE, [STAGES, TILE, D], SHARED)
    queries = gl.allocate_shared_memory(TYPE, [QUERIES, HEADS, D], SHARED)
    weights = gl.allocate_shared_memory(TYPE, [TILES, HEADS, TILE], SHARED)
    fresh = gl.allocate_shared_memory(TYPE, [ROWS, D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_filled = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(QUERIES):
        mbarrier.init(q_filled.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    if DEPENDENT and not EARLY:
        gdc_wait()
    items = gl.load(count) * KV_HEADS
    program, programs = gl.program_id(0), gl.num_programs(0)
    gl.warp_specialize(
        [
            (_consumer, (tables, table_stride, slots, token_of, lengths, work_row, work_split, work_item, part_acc,
                         part_l, part_m, scale, items, program, programs, queries, weights, ring, filled, empty,
                         q_filled, q_empty, qkv, q_weight, k_weight, cosines, sines, k_cache, v_cache, epsilon, clip,
                         fresh, KV_HEADS, G, HEADS, D, PAGE, WINDOW, SPLIT, STAGES, FRESH, CLIP, NORM, EARLY)),
            (_producer, (q_desc, k_desc, v_desc, tables, table_stride, slots, token_of, lengths, work_row, work_split,
                         items, program, programs, queries, ring, filled, empty, q_filled, q_empty,
                         KV_HEADS, G, HEADS, D, PAGE, SPLIT, STAGES, FRESH, EARLY)),
        ],
        [1],
        [48],
    )  # fmt: skip
