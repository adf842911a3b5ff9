# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""A product for Hopper, in Gluon, with the weights as the tall operand: y^T = w x^T.

Knows how the sum is spread over instructions, shared memory and time. Does not know who launches it. Invariant: an
output is summed over K in ascending order in one fp32 accumulator, 16 columns an instruction, and rounded once: the
bits of `matmul.few_rows_kernel`, which is the plain twin that tests compare with (Gluon has no interpreter).

Two things are gained over it. A tile has any multiple of 8 weight rows (CUT), so that every processor gets the same
share of a matrix, while one row of x fills 8 columns of an instruction and not 64. And the ring is filled with
weights before the kernel before has ended: only x is waited for.

An instruction reads WINDOW >= CUT rows of the ring. Those past CUT are other rows of the ring, or nothing that was
ever written; what they give lands in accumulators of their own, which are never stored.

A producer warp fills the ring, and WARPS other warps multiply. Step t of a program (a stretch of BLOCK_K columns of one
tile) lies in slot t % STAGES, in its use u = t // STAGES. A barrier's n-th phase is a slot's n-th use:
- `filled[slot]` ends phase u when all bytes of use u have arrived, w's and x's: one arrival, with both sums of bytes.
- `empty[slot]` ends phase u when the consumers, at step t + 1, have seen the instructions of step t end. Before it asks
  for step t the producer waits for phase u - 1 (none for u = 0). Steps are waited for in the order in which they are
  asked for, and STAGES >= 2, so neither side can wait for what the other does not reach; both count the same steps.
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

from worker_svc.cuda.norm_hopper_kernel import columns, norm_rows

PANEL: gl.constexpr = gl.constexpr(64)  # columns of K that one swizzled row of shared memory holds


@gluon.jit
def _row_tiles(rows_ptr, HEIGHT: gl.constexpr, ONE: gl.constexpr):
    """How many row tiles there are. That is known before the kernel before has ended if there is room for one only."""
    if ONE:
        tiles = 1
    else:
        tiles = (gl.load(rows_ptr) + HEIGHT - 1) // HEIGHT
    return tiles


@gluon.jit
def _place(tile, row_tiles, column_tiles, GROUP: gl.constexpr):
    """(row, column) of a tile; GROUP row tiles walk along N together, so that both operands stay in L2."""
    first = tile // (GROUP * column_tiles) * GROUP
    height = gl.minimum(row_tiles - first, GROUP)
    within = tile % (GROUP * column_tiles)
    return first + within % height, within // height


@gluon.jit
def _ask_w(w_desc, w_ring, barrier, n0, k0, slot, PANELS: gl.constexpr, CUT: gl.constexpr, BOX: gl.constexpr):
    BOXES: gl.constexpr = CUT // BOX
    for p in gl.static_range(PANELS):
        for b in gl.static_range(BOXES):
            tma.async_copy_global_to_shared(
                w_desc, [n0 + b * BOX, k0 + p * PANEL], barrier, w_ring.index((slot * PANELS + p) * BOXES + b)
            )


@gluon.jit
def _ask_x(x_desc, x_ring, barrier, m0, k0, slot, PANELS: gl.constexpr):
    for p in gl.static_range(PANELS):
        tma.async_copy_global_to_shared(x_desc, [m0, k0 + p * PANEL], barrier, x_ring.index(slot * PANELS + p))


@gluon.jit
def _silu_times_up(acc, TYPE: gl.constexpr, WINDOW: gl.constexpr, HEIGHT: gl.constexpr):
    """As `matmul.silu_times_up`: a thread holds row i of a group of gate rows and of the group of up rows after it."""
    pairs = gl.permute(gl.reshape(acc, (WINDOW // 16, 2, 8, HEIGHT)), (0, 2, 3, 1))
    gate, up = gl.split(pairs)
    gate = gate.to(TYPE).to(gl.float32)
    up = up.to(TYPE).to(gl.float32)
    return gl.reshape(gate / (1.0 + gl.exp(-gate)) * up, (WINDOW // 2, HEIGHT))


@gluon.jit
def _store_box(acc, y_desc, bias_ptr, y_box, m0, n0, N, TYPE: gl.constexpr, CUT: gl.constexpr, HEIGHT: gl.constexpr,
               WARPS: gl.constexpr, GATED: gl.constexpr, BIASED: gl.constexpr):  # fmt: skip
    """Through shared memory, whole rows of a tile at once; CUT is the window here."""
    if GATED:
        out = _silu_times_up(acc, TYPE, CUT, HEIGHT)
    else:
        out = acc
        if BIASED:
            ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEIGHT, 16])
            n = n0 + gl.arange(0, CUT, gl.SliceLayout(1, ACC))
            out += gl.expand_dims(gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32), 1)
    tma.store_wait(0)  # the tile before has left
    gl.thread_barrier()
    y_box.permute((1, 0)).store(out.to(y_box.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(y_desc, [m0, n0 // 2 if GATED else n0], y_box)


@gluon.jit
def _store(acc, y_ptr, bias_ptr, rows, m0, n0, N, y_stride, TYPE: gl.constexpr, CUT: gl.constexpr,
           WINDOW: gl.constexpr, HEIGHT: gl.constexpr, WARPS: gl.constexpr, GATED: gl.constexpr,
           BIASED: gl.constexpr):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEIGHT, 16])
    if GATED:
        folded = _silu_times_up(acc, TYPE, WINDOW, HEIGHT)
        # Its layout is what the compiler derives; the store's places are derived likewise.
        row = gl.arange(0, WINDOW, gl.SliceLayout(1, ACC))
        n_all = gl.expand_dims(row, 1) + 0 * gl.expand_dims(gl.arange(0, HEIGHT, gl.SliceLayout(0, ACC)), 0)
        m_all = 0 * gl.expand_dims(row, 1) + gl.expand_dims(gl.arange(0, HEIGHT, gl.SliceLayout(0, ACC)), 0)
        n, _ = gl.split(gl.permute(gl.reshape(n_all, (WINDOW // 16, 2, 8, HEIGHT)), (0, 2, 3, 1)))
        m, _ = gl.split(gl.permute(gl.reshape(m_all, (WINDOW // 16, 2, 8, HEIGHT)), (0, 2, 3, 1)))
        n = gl.reshape(n, (WINDOW // 2, HEIGHT))
        m = gl.reshape(m, (WINDOW // 2, HEIGHT)) + m0
        live = (n < CUT) & (n0 + n < N) & (m < rows)
        to = n0 // 2 + n // 16 * 8 + n % 8
        gl.store(y_ptr + m.to(gl.int64) * y_stride + to, folded.to(y_ptr.dtype.element_ty), mask=live)
    else:
        n = gl.arange(0, WINDOW, gl.SliceLayout(1, ACC))
        m = m0 + gl.arange(0, HEIGHT, gl.SliceLayout(0, ACC))
        inside = (n < CUT) & (n0 + n < N)
        if BIASED:
            acc += gl.expand_dims(gl.load(bias_ptr + n0 + n, mask=inside, other=0.0).to(gl.float32), 1)
        live = gl.expand_dims(inside, 1) & gl.expand_dims(m < rows, 0)
        at = gl.expand_dims(m.to(gl.int64) * y_stride, 0) + gl.expand_dims(n0 + n, 1)
        gl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=live)


@gluon.jit
def _produce(x_desc, w_desc, rows_ptr, K, column_tiles, w_ring, x_ring, filled, empty,
             HEIGHT: gl.constexpr, CUT: gl.constexpr, BOX: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr,
             GROUP: gl.constexpr, ONE: gl.constexpr, NORMED: gl.constexpr, DEPENDENT: gl.constexpr):  # fmt: skip
    BLOCK_K: gl.constexpr = PANELS * PANEL
    BYTES: gl.constexpr = (CUT if NORMED else CUT + HEIGHT) * BLOCK_K * 2
    if DEPENDENT and not ONE:
        gdc_wait()
    row_tiles = _row_tiles(rows_ptr, HEIGHT, ONE)
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    steps = (K + BLOCK_K - 1) // BLOCK_K
    tiles = row_tiles * column_tiles
    total = gl.maximum(tiles - first + programs - 1, 0) // programs * steps
    ahead = gl.minimum(total, STAGES)
    for t in range(0, ahead):
        _, n = _place(first + t // steps * programs, row_tiles, column_tiles, GROUP)
        mbarrier.expect(filled.index(t), BYTES)
        _ask_w(w_desc, w_ring, filled.index(t), n * CUT, t % steps * BLOCK_K, t, PANELS, CUT, BOX)
    if not NORMED:
        if DEPENDENT and ONE:
            gdc_wait()
        for t in range(0, ahead):
            m, _ = _place(first + t // steps * programs, row_tiles, column_tiles, GROUP)
            _ask_x(x_desc, x_ring, filled.index(t), m * HEIGHT, t % steps * BLOCK_K, t, PANELS)
    for t in range(ahead, total):
        m, n = _place(first + t // steps * programs, row_tiles, column_tiles, GROUP)
        k0 = t % steps * BLOCK_K
        slot = t % STAGES
        mbarrier.wait(empty.index(slot), (t // STAGES + 1) & 1)
        mbarrier.expect(filled.index(slot), BYTES)
        _ask_w(w_desc, w_ring, filled.index(slot), n * CUT, k0, slot, PANELS, CUT, BOX)
        if not NORMED:
            _ask_x(x_desc, x_ring, filled.index(slot), m * HEIGHT, k0, slot, PANELS)


@gluon.jit
def _consume(y_desc, y_ptr, bias_ptr, rows_ptr, update, residual, total, scale_ptr, epsilon, N, K, y_stride,
             column_tiles, w_ring, x_ring, y_box, filled, empty,
             HEIGHT: gl.constexpr, CUT: gl.constexpr, WINDOW: gl.constexpr, BOX: gl.constexpr, PANELS: gl.constexpr,
             STAGES: gl.constexpr, GROUP: gl.constexpr, ONE: gl.constexpr, WARPS: gl.constexpr, GATED: gl.constexpr,
             BIASED: gl.constexpr, BOXED: gl.constexpr, NORMED: gl.constexpr, LIVE: gl.constexpr,
             DEPENDENT: gl.constexpr, LATE: gl.constexpr):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEIGHT, 16])
    TYPE: gl.constexpr = w_ring.dtype
    if NORMED:
        at = columns(NORMED)
        scale = gl.load(scale_ptr + at).to(gl.float32)  # a weight: nobody writes it
    if DEPENDENT:
        gdc_wait()
    if DEPENDENT and LATE:
        gdc_launch_dependents()
    rows = gl.load(rows_ptr)
    if NORMED:
        whole = x_ring._reinterpret(TYPE, [NORMED // PANEL * HEIGHT, PANEL], x_ring.layout)
        norm_rows(update, residual, total, rows, at, scale, epsilon, K, whole, NORMED, LIVE, PANEL)
        fence_async_shared()
        gl.thread_barrier()
    row_tiles = _row_tiles(rows_ptr, HEIGHT, ONE)
    steps = (K + PANELS * PANEL - 1) // (PANELS * PANEL)
    t = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        acc = gl.zeros([WINDOW, HEIGHT], gl.float32, ACC)
        for step in range(0, steps):
            slot = t % STAGES
            mbarrier.wait(filled.index(slot), (t // STAGES) & 1)
            for p in gl.static_range(PANELS):
                boxes = w_ring.index((slot * PANELS + p) * (CUT // BOX))
                window = boxes._reinterpret(TYPE, [WINDOW, PANEL], w_ring.layout)
                x = x_ring.index((step if NORMED else slot) * PANELS + p)
                acc = warpgroup_mma(window, x.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(PANELS, deps=(acc,))  # only this step's are out, so the slot before is free
            gl.thread_barrier()  # for all warps
            mbarrier.arrive(empty.index((t + STAGES - 1) % STAGES), pred=t > 0)
            t += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        m, n = _place(tile, row_tiles, column_tiles, GROUP)
        m0 = m * HEIGHT
        n0 = n * CUT
        if BOXED:
            _store_box(acc, y_desc, bias_ptr, y_box, m0, n0, N, TYPE, CUT, HEIGHT, WARPS, GATED, BIASED)
        else:
            _store(acc, y_ptr, bias_ptr, rows, m0, n0, N, y_stride, TYPE, CUT, WINDOW, HEIGHT, WARPS, GATED, BIASED)
    if BOXED:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["column_tiles"])
def hopper_kernel(x_desc, w_desc, y_desc, y_ptr, bias_ptr, rows_ptr, update, residual, total, scale_ptr, epsilon,
                  N, K, y_stride, column_tiles,
                  HEIGHT: gl.constexpr, CUT: gl.constexpr, WINDOW: gl.constexpr, BOX: gl.constexpr,
                  BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, ONE: gl.constexpr,
                  WARPS: gl.constexpr, GATED: gl.constexpr, BIASED: gl.constexpr, BOXED: gl.constexpr,
                  NORMED: gl.constexpr, LIVE: gl.constexpr, DEPENDENT: gl.constexpr,
                  LATE: gl.constexpr):  # fmt: skip
    """Program p has tiles p, p + programs, .. of [HEIGHT, CUT] each.

    Args:
        x_desc, w_desc: [M, K] and [N, K] in boxes of [HEIGHT, PANEL] and [BOX, PANEL].
        y_desc: [M, N] in boxes of a tile if BOXED, else anything; y_ptr likewise if not.
        ONE: x has at most HEIGHT rows.
        NORMED: 0, or K: then x is norm(total), total = update + residual, LIVE rows high and known to nobody else; it
            takes the place of x's ring.
        LATE: the next kernel is let begin only when all kernels before this one have ended, so that it need not wait
            for what they wrote.
    """
    if DEPENDENT and not LATE:
        gdc_launch_dependents()
    PANELS: gl.constexpr = BLOCK_K // PANEL
    SPARE: gl.constexpr = (WINDOW - CUT) // BOX  # boxes that the last window reads past the ring
    w_ring = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES * PANELS * (CUT // BOX) + SPARE, BOX, PANEL], w_desc.layout
    )
    HELD: gl.constexpr = NORMED // PANEL if NORMED else STAGES * PANELS
    x_ring = gl.allocate_shared_memory(w_desc.dtype, [HELD, HEIGHT, PANEL], x_desc.layout)
    if BOXED:
        y_box = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_shape, y_desc.layout)
    else:
        y_box = x_ring
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_consume, (y_desc, y_ptr, bias_ptr, rows_ptr, update, residual, total, scale_ptr, epsilon, N, K, y_stride,
                        column_tiles, w_ring, x_ring, y_box, filled, empty, HEIGHT, CUT, WINDOW, BOX, PANELS, STAGES,
                        GROUP, ONE, WARPS, GATED, BIASED, BOXED, NORMED, LIVE, DEPENDENT, LATE)),
            (_produce, (x_desc, w_desc, rows_ptr, K, column_tiles, w_ring, x_ring, filled, empty,
                        HEIGHT, CUT, BOX, PANELS, STAGES, GROUP, ONE, NORMED, DEPENDENT)),
        ],
        [1],
        [40],
    )  # fmt: skip
