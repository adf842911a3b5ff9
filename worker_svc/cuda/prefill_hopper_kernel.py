# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Prefill attention for Hopper, in Gluon: the expression of `attention_kernels.py`, scheduled by hand.

Knows how the expression is spread over warps and time: a producer warp brings key and value tiles through a ring in
shared memory, and two groups of four warps each own half of a tile's rows. A group asks for the scores of tile t + 1
before it computes the softmax of tile t, and lets the product of P and V run into the softmax after it. Does not know
who launches it. Invariant: a row's operations and their order are those of `attention_kernels.prefill_kernel`, so its
bits are too; there is no interpreter for Gluon, so that kernel is the plain twin that tests compare with.

Splits that every row of a half sees whole are `_whole_splits`: there the fold of one split lies in the first tile of
the next, when its last product has arrived. What remains (the diagonal, windows) is `_masked_splits`.

Legend: T tokens, H query heads, K kv heads, G = H / K, D head width. A layer's cache is [blocks, K, block, D].
Barriers count uses of a ring's slots: tile t lies in slot t % STAGES, in its (t // STAGES)-th use.
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

HALF: gl.constexpr = gl.constexpr(64)  # rows of a group of four warps: the height of one instruction
TILE: gl.constexpr = gl.constexpr(64)
ONES: gl.constexpr = gl.constexpr(8)  # columns of the product that sums rows, the fewest there are; only one counts
MMA_S: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
MMA_L: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))
ROW: gl.constexpr = gl.constexpr(gl.SliceLayout(1, MMA_S.value))  # a number a row, in whose layout softmax is done


@gluon.jit
def _scores(Q, K_ring, filled, t, ask, STAGES: gl.constexpr):
    """Ask for the scores of tile t. Without `ask` of whatever the slot holds, to be thrown away."""
    slot = t % STAGES
    mbarrier.wait(filled.index(slot), (t // STAGES) & 1, pred=ask)
    zeros = gl.zeros([HALF, TILE], gl.float32, MMA_S)
    return warpgroup_mma(Q, K_ring.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def rounded_product(x, scale):
    """x * scale, which no later subtraction may be contracted with: there is no maximum between them to forbid it."""
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, gl.zeros_like(x) + scale], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _values(P, unit, V_ring, t, sums, acc, FIRST: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr):
    """Ask for P's row sums and its product with the values of tile t, which has arrived."""
    P_l = gl.convert_layout(P, gl.DotOperandLayout(0, MMA_L, 2))
    P_o = gl.convert_layout(P, gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]), 2))
    sums = warpgroup_mma(P_l, unit, sums, use_acc=not FIRST, is_async=True)
    acc = warpgroup_mma(P_o, V_ring.index(t % STAGES), acc, use_acc=not FIRST, is_async=True)
    return sums, acc


@gluon.jit
def _rows_of(x, LAYOUT: gl.constexpr):
    """A number a row, in the layout of a product's rows: the same registers."""
    return gl.convert_layout(x, gl.SliceLayout(1, LAYOUT))


@gluon.jit
def _fold(M, L, ACC, m, sums, acc, MASKED: gl.constexpr, OUT: gl.constexpr):
    """Add a split to what is folded so far. Before the first split, all of both is nothing, and stays so."""
    top = gl.maximum(M, m)
    safe = gl.where(top > float("-inf"), top, 0.0)
    a = gl.exp2(M - safe)
    w = gl.exp2(m - safe)
    new_L = gl.fma(_rows_of(gl.sum(sums, 1), MMA_S), w, L * a)
    new_ACC = gl.fma(acc, gl.expand_dims(_rows_of(w, OUT), 1), ACC * gl.expand_dims(_rows_of(a, OUT), 1))
    if MASKED:
        seen = m > float("-inf")
        new_L = gl.where(seen, new_L, L)
        new_ACC = gl.where(gl.expand_dims(_rows_of(seen, OUT), 1), new_ACC, ACC)
    return top, new_L, new_ACC


@gluon.jit
def _whole_splits(Q, unit, K_ring, V_ring, k_filled, v_filled, k_empty, v_empty, S, scale, t, t_whole, t_end,
                  TYPE: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
                  SPLIT: gl.constexpr):  # fmt: skip
    """Tiles t .. t_whole, whole splits that all rows see; S: scores of tile t. Returns those of t_whole, which
    mean nothing when it is t_end."""
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    M = gl.full([HALF], float("-inf"), gl.float32, ROW)
    L = gl.zeros([HALF], gl.float32, ROW)
    ACC = gl.zeros([HALF, D], gl.float32, OUT)
    for low in range(t, t_whole, SPLIT // TILE):
        m = M
        sums = gl.zeros([HALF, ONES], gl.float32, MMA_L)
        acc = gl.zeros([HALF, D], gl.float32, OUT)
        for i in gl.static_range(SPLIT // TILE):
            now = low + i
            if i == 0:
                top = rounded_product(gl.max(S, 1), scale)
            else:
                top = gl.maximum(m, gl.max(S, 1) * scale)
                a = gl.exp2(m - top)
            P = gl.exp2(gl.fma(S, scale, -gl.expand_dims(top, 1))).to(TYPE)
            m = top
            if i > 0:
                sums, acc = warpgroup_mma_wait(0, deps=(sums, acc))  # of the tile before
                mbarrier.arrive(v_empty.index((now + STAGES - 1) % STAGES))
                sums = sums * gl.expand_dims(_rows_of(a, MMA_L), 1)
                acc = acc * gl.expand_dims(_rows_of(a, OUT), 1)
            S_next = _scores(Q, K_ring, k_filled, now + 1, now + 1 < t_end, STAGES)
            mbarrier.wait(v_filled.index(now % STAGES), (now // STAGES) & 1)
            sums, acc = _values(P, unit, V_ring, now, sums, acc, i == 0, STAGES, D)
            # What is in flight may not cross the loop's back edge: the assembler would wait after every instruction.
            if i < SPLIT // TILE - 1:
                S = warpgroup_mma_wait(2, deps=(S_next,))
            else:
                S, sums, acc = warpgroup_mma_wait(0, deps=(S_next, sums, acc))
                mbarrier.arrive(v_empty.index(now % STAGES))
            mbarrier.arrive(k_empty.index((now + 1) % STAGES), pred=now + 1 < t_end)
        M, L, ACC = _fold(M, L, ACC, m, sums, acc, False, OUT)
    return S, M, L, ACC


@gluon.jit
def _masked_splits(Q, unit, K_ring, V_ring, k_filled, v_filled, k_empty, v_empty, S, M, L, ACC, scale,
                   t, t_end, begin, oldest, position, end,
                   TYPE: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, SPLIT: gl.constexpr):  # fmt: skip
    """Tiles t .. t_end, in which a row sees keys oldest .. position of its own; S: scores of tile t."""
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    B: gl.constexpr = gl.BlockedLayout([1, 8], [2 if D == 128 else 4, 16 if D == 128 else 8], [4, 1], [1, 0])
    for low in range(t, t_end, SPLIT // TILE):
        m = gl.full([HALF], float("-inf"), gl.float32, ROW)
        sums = gl.zeros([HALF, ONES], gl.float32, MMA_L)
        acc = gl.zeros([HALF, D], gl.float32, OUT)
        for now in range(low, gl.minimum(low + SPLIT // TILE, t_end)):
            first = begin + now * TILE
            slot = now % STAGES
            mbarrier.wait(v_filled.index(slot), (now // STAGES) & 1)
            if first + TILE > end:  # nobody's values become 0, because 0 times NaN is NaN; both halves write the same
                values = V_ring.index(slot).load(B)
                key = first + gl.arange(0, TILE, gl.SliceLayout(1, B))
                V_ring.index(slot).store(gl.where(gl.expand_dims(key < end, 1), values, gl.zeros_like(values)))
                fence_async_shared()
                gl.thread_barrier()
            S_next = _scores(Q, K_ring, k_filled, now + 1, now + 1 < t_end, STAGES)
            key = first + gl.arange(0, TILE, gl.SliceLayout(0, MMA_S))
            seen = (gl.expand_dims(key, 0) >= gl.expand_dims(oldest, 1)) & (
                gl.expand_dims(key, 0) <= gl.expand_dims(position, 1)
            )
            S = gl.where(seen, S, float("-inf"))
            top = gl.maximum(m, gl.max(S, 1) * scale)
            safe = gl.where(top > float("-inf"), top, 0.0)
            a = gl.where(top > float("-inf"), gl.exp2(m - safe), 1.0)
            P = gl.exp2(gl.fma(S, scale, -gl.expand_dims(safe, 1))).to(TYPE)
            m = top
            sums_, acc_ = _values(
                P, unit, V_ring, now, sums * gl.expand_dims(_rows_of(a, MMA_L), 1),
                acc * gl.expand_dims(_rows_of(a, OUT), 1), False, STAGES, D,
            )  # fmt: skip
            S, sums, acc = warpgroup_mma_wait(0, deps=(S_next, sums_, acc_))
            mbarrier.arrive(k_empty.index((now + 1) % STAGES), pred=now + 1 < t_end)
            mbarrier.arrive(v_empty.index(slot))
        M, L, ACC = _fold(M, L, ACC, m, sums, acc, True, OUT)
    return L, ACC


@gluon.jit
def _half(q, out, Q_ring, unit, K_ring, V_ring, k_filled, v_filled, k_empty, v_empty, scale, start, new,
          context, token0, h, begin, t_whole, t_end, end, me: gl.constexpr,
          KV_HEADS: gl.constexpr, G: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr, SPLIT: gl.constexpr,
          STAGES: gl.constexpr):  # fmt: skip
    """Rows me * HALF .. of the tile: load them, go through all keys, write the result."""
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    B: gl.constexpr = gl.BlockedLayout([1, 8], [2 if D == 128 else 4, 16 if D == 128 else 8], [4, 1], [1, 0])
    TOKENS: gl.constexpr = 2 * HALF // G
    r = me * HALF + gl.arange(0, HALF, gl.SliceLayout(1, B))
    d = gl.arange(0, D, gl.SliceLayout(0, B))
    token = token0 + r // G
    live = (token < new) & (r // G < TOKENS)
    at = ((start + token).to(gl.int64) * KV_HEADS * G + h * G + r % G) * D
    Q = Q_ring.index(me)
    Q.store(gl.load(q + gl.expand_dims(at, 1) + gl.expand_dims(d, 0), mask=gl.expand_dims(live, 1), other=0.0))
    fence_async_shared()
    gl.thread_barrier()
    S = warpgroup_mma_wait(0, deps=(_scores(Q, K_ring, k_filled, 0, True, STAGES),))
    mbarrier.arrive(k_empty.index(0))
    TYPE: gl.constexpr = K_ring.dtype
    S, M, L, ACC = _whole_splits(Q, unit, K_ring, V_ring, k_filled, v_filled, k_empty, v_empty, S, scale,
                                 0, t_whole, t_end, TYPE, STAGES, D, SPLIT)  # fmt: skip
    position = context + token0 + (me * HALF + gl.arange(0, HALF, ROW)) // G
    oldest = position + 1 - WINDOW if WINDOW else 0 * position
    L, ACC = _masked_splits(Q, unit, K_ring, V_ring, k_filled, v_filled, k_empty, v_empty, S, M, L, ACC,
                            scale, t_whole, t_end, begin, oldest, position, end, TYPE, STAGES, D,
                            SPLIT)  # fmt: skip
    result = ACC / gl.expand_dims(_rows_of(gl.where(L > 0.0, L, 1.0), OUT), 1)
    Q.store(result.to(TYPE))  # whole rows leave at once; this half's queries have been read
    gl.thread_barrier()
    gl.store(out + gl.expand_dims(at, 1) + gl.expand_dims(d, 0), Q.load(B), mask=gl.expand_dims(live, 1))


@gluon.jit
def _first_row(table, position, h, KV_HEADS: gl.constexpr, PAGE: gl.constexpr):
    """Row number of a key of kv head h in a cache seen as [blocks * K * block, D]."""
    return (gl.load(table + position // PAGE) * KV_HEADS + h) * PAGE + position % PAGE


@gluon.jit
def _producer(k_desc, v_desc, table, K_ring, V_ring, k_filled, v_filled, k_empty, v_empty, h, begin, t_end,
              KV_HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Bring tiles 0 .. t_end into the rings, each when both halves are done with what was there."""
    BYTES: gl.constexpr = TILE * D * 2
    BOX: gl.constexpr = k_desc.block_shape[0]
    for t in range(0, t_end):
        first = begin + t * TILE
        slot = t % STAGES
        before = (t // STAGES + 1) & 1
        mbarrier.wait(k_empty.index(slot), before)
        mbarrier.expect(k_filled.index(slot), BYTES)
        for i in gl.static_range(TILE // BOX):
            row = _first_row(table, first + i * BOX, h, KV_HEADS, PAGE)
            tma.async_copy_global_to_shared(
                k_desc, [row, 0], k_filled.index(slot), K_ring.index(slot).slice(i * BOX, BOX, 0)
            )
        mbarrier.wait(v_empty.index(slot), before)
        mbarrier.expect(v_filled.index(slot), BYTES)
        for i in gl.static_range(TILE // BOX):
            row = _first_row(table, first + i * BOX, h, KV_HEADS, PAGE)
            tma.async_copy_global_to_shared(
                v_desc, [row, 0], v_filled.index(slot), V_ring.index(slot).slice(i * BOX, BOX, 0)
            )


@gluon.jit
def hopper_prefill_kernel(q, k_desc, v_desc, tables, table_stride, slots, query_starts, first_positions, tile_row,
                          tile_token, count, out, scale,
                          KV_HEADS: gl.constexpr, G: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
                          WINDOW: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
                          DEPENDENT: gl.constexpr):  # fmt: skip
    """Program (kv head, tile): 2 * HALF rows, as in `attention_kernels.prefill_kernel`, on 4 warps and 5 more."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    tile = gl.program_id(1)
    h = gl.program_id(0)
    if tile < gl.load(count):
        row = gl.load(tile_row + tile)
        token0 = gl.load(tile_token + tile)
        start = gl.load(query_starts + row)
        new = gl.load(query_starts + row + 1) - start
        context = gl.load(first_positions + row)
        table = tables + gl.load(slots + row).to(gl.int64) * table_stride
        end = context + gl.minimum(token0 + 2 * HALF // G, new)
        first_row = context + token0
        if WINDOW:
            begin = gl.maximum(first_row + 1 - WINDOW, 0) // SPLIT * SPLIT
            t_whole = 0
        else:
            begin = 0
            t_whole = (first_row + 1) // SPLIT * (SPLIT // TILE)  # every row sees every key below
        t_end = (end - begin + TILE - 1) // TILE

        TYPE: gl.constexpr = k_desc.dtype
        SHARED: gl.constexpr = k_desc.layout
        Q_ring = gl.allocate_shared_memory(TYPE, [2, HALF, D], SHARED)
        K_ring = gl.allocate_shared_memory(TYPE, [STAGES, TILE, D], SHARED)
        V_ring = gl.allocate_shared_memory(TYPE, [STAGES, TILE, D], SHARED)
        k_filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(k_filled.index(i), count=1)
            mbarrier.init(v_filled.index(i), count=1)
            mbarrier.init(k_empty.index(i), count=2)
            mbarrier.init(v_empty.index(i), count=2)
        U: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
        ones_row = gl.expand_dims(gl.arange(0, ONES, gl.SliceLayout(1, U)), 1)
        ones = ones_row + 0 * gl.expand_dims(gl.arange(0, TILE, gl.SliceLayout(0, U)), 0)
        unit_T = gl.allocate_shared_memory(
            TYPE, [ONES, TILE], gl.NVMMASharedLayout(128, 16, 2),
            gl.where(ones == 0, 1.0, 0.0).to(TYPE),
        )  # fmt: skip
        unit = unit_T.permute((1, 0))
        fence_async_shared()
        gl.thread_barrier()
        gl.warp_specialize(
            [
                (_half, (q, out, Q_ring, unit, K_ring, V_ring, k_filled, v_filled, k_empty, v_empty, scale, start,
                         new, context, token0, h, begin, t_whole, t_end, end, 0,
                         KV_HEADS, G, D, WINDOW, SPLIT, STAGES)),
                (_half, (q, out, Q_ring, unit, K_ring, V_ring, k_filled, v_filled, k_empty, v_empty, scale, start,
                         new, context, token0, h, begin, t_whole, t_end, end, 1,
                         KV_HEADS, G, D, WINDOW, SPLIT, STAGES)),
                (_producer, (k_desc, v_desc, table, K_ring, V_ring, k_filled, v_filled, k_empty, v_empty, h, begin,
                             t_end, KV_HEADS, D, PAGE, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
