# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""`rows.add_norm_kernel` as the beginning of a product of few rows, in Gluon: every program norms them for itself.

A kernel and a way to memory and back are saved; what remains is hidden behind the first weights. Four warps do what
eight do there, each thread the work of two: the additions of a sum have the order that the compiler gives the 256
threads of that kernel (a thread's columns, its warp's lanes, the warps), so the bits are the same. Tests compare them.

Legend: C columns, a power of two from 1024 up; LIVE rows, 1 or 2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

THREADS: gl.constexpr = gl.constexpr(256)  # of the kernel whose sums these are


@gluon.jit
def columns(C: gl.constexpr):
    """[THREADS, C / THREADS]: the columns that each thread of that kernel has, in the order in which it adds them."""
    EACH: gl.constexpr = C // THREADS
    AT_ONCE: gl.constexpr = min(8, EACH)
    L: gl.constexpr = gl.BlockedLayout([1, EACH], [32, 1], [4, 1], [1, 0])
    thread = gl.arange(0, THREADS, gl.SliceLayout(1, L))
    j = gl.arange(0, EACH, gl.SliceLayout(0, L))
    return gl.expand_dims(thread * AT_ONCE, 1) + gl.expand_dims(j // AT_ONCE * (AT_ONCE * THREADS) + j % AT_ONCE, 0)


@gluon.jit
def _sum(values):
    """Of [THREADS, n], in the order of a reduction by 8 warps of 32 lanes."""
    lanes = gl.sum(gl.reshape(gl.sum(values, 1), (2, 4, 32)), 2)
    return gl.sum(gl.sum(lanes, 0), 0)


@gluon.jit
def _normed(update, residual, total, row, rows, at, scale, epsilon, width):
    """The row's norm, in the layout of `columns`; the first program notes the row's sum in `total`."""
    here = (row < rows) & (at >= 0)
    to = row * width + at
    x = gl.load(update + to, mask=here, other=0.0).to(gl.float32)
    x += gl.load(residual + to, mask=here, other=0.0).to(gl.float32)
    rounded = x.to(total.dtype.element_ty)
    if gl.program_id(0) == 0:
        gl.store(total + to, rounded, mask=here)
    x = rounded.to(gl.float32)
    return (x * gl.rsqrt(_sum(x * x) / width + epsilon) * scale).to(rounded.dtype)


@gluon.jit
def _in_panels(y, C: gl.constexpr, PANEL: gl.constexpr):
    """The layout of `columns` -> [C / PANEL, PANEL]; nothing moves."""
    EACH: gl.constexpr = C // THREADS
    AT_ONCE: gl.constexpr = min(8, EACH)
    LANES: gl.constexpr = PANEL // AT_ONCE
    split = gl.reshape(y, (THREADS // LANES, LANES, EACH // AT_ONCE, AT_ONCE))
    return gl.reshape(gl.permute(split, (2, 0, 1, 3)), (C // PANEL, PANEL))


@gluon.jit
def norm_rows(update, residual, total, rows, at, scale, epsilon, width, to,
              C: gl.constexpr, LIVE: gl.constexpr, PANEL: gl.constexpr):  # fmt: skip
    """total = update + residual; the norms of all rows to shared memory `to`, [C / PANEL * 8, PANEL].

    An instruction reads eight rows: row i lies there as i, i + LIVE, ..
    """
    y0 = _in_panels(_normed(update, residual, total, 0, rows, at, scale, epsilon, width), C, PANEL)
    if LIVE == 1:
        pairs = gl.join(y0, y0)
    else:
        gl.static_assert(LIVE == 2)
        y1 = _in_panels(_normed(update, residual, total, 1, rows, at, scale, epsilon, width), C, PANEL)
        pairs = gl.join(y0, y1)
    fours = gl.join(pairs, pairs)
    eight = gl.join(fours, fours)  # [C / PANEL, PANEL, bits of the row from the lowest up]
    to.store(gl.reshape(gl.permute(eight, (0, 4, 3, 2, 1)), (C // PANEL * 8, PANEL)))
