# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Products whose K is cut into leaves: a sum a leaf, folded in the order of `ops/leaves.py`.

Know tiles, as `matmul.py`'s kernels do. Invariant: a leaf is added over its K in ascending order in one fp32
accumulator from zero, so tiles, and which of the two kernels it is, change no bit.

Legend: M rows, N outputs, K inputs, L leaves.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _leaf(x_desc, w_desc, m0, n0, first, LEAF_K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(first, first + LEAF_K, BLOCK_K):
        acc = tl.dot(x_desc.load([m0, k]), w_desc.load([n0, k]).T, acc)
    return acc


@triton.jit
def _node(x_desc, w_desc, m0, n0, LEAF_K, FIRST: tl.constexpr, COUNT: tl.constexpr, BLOCK_M: tl.constexpr,
          BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """`leaves.fold` of COUNT leaves from FIRST on: sums that wait stay in registers."""
    if COUNT == 1:
        total = _leaf(x_desc, w_desc, m0, n0, FIRST * LEAF_K, LEAF_K, BLOCK_M, BLOCK_N, BLOCK_K)
    elif COUNT % 2 == 0:
        HALF: tl.constexpr = COUNT // 2
        total = _node(x_desc, w_desc, m0, n0, LEAF_K, FIRST, HALF, BLOCK_M, BLOCK_N, BLOCK_K)
        total += _node(x_desc, w_desc, m0, n0, LEAF_K, FIRST + HALF, HALF, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        total = _leaf(x_desc, w_desc, m0, n0, FIRST * LEAF_K, LEAF_K, BLOCK_M, BLOCK_N, BLOCK_K)
        for leaf in tl.static_range(1, COUNT):
            total += _leaf(x_desc, w_desc, m0, n0, (FIRST + leaf) * LEAF_K, LEAF_K, BLOCK_M, BLOCK_N, BLOCK_K)
    return total


@triton.jit
def leaves_apart_kernel(x_desc, w_desc, y_ptr, rows_ptr, N, LEAF_K, leaf_stride, BLOCK_M: tl.constexpr,
                        BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """y [L, M, N] fp32: one program a tile and a leaf, for few rows, where there are too few tiles to go round."""
    m0 = tl.program_id(0) * BLOCK_M
    n0 = tl.program_id(1) * BLOCK_N
    leaf = tl.program_id(2)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    rows = tl.load(rows_ptr)
    if m0 < rows:
        acc = _leaf(x_desc, w_desc, m0, n0, leaf * LEAF_K, LEAF_K, BLOCK_M, BLOCK_N, BLOCK_K)
        m = m0 + tl.arange(0, BLOCK_M)
        n = n0 + tl.arange(0, BLOCK_N)
        at = y_ptr + leaf.to(tl.int64) * leaf_stride + m[:, None].to(tl.int64) * N + n[None, :]
        tl.store(at, acc, mask=(m[:, None] < rows) & (n[None, :] < N))


@triton.jit
def leaves_folded_kernel(x_desc, w_desc, y_ptr, bias_ptr, rows_ptr, N, LEAF_K, tiles_n, LEAVES: tl.constexpr,
                         BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
                         BIASED: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """y [M, N], folded and rounded once: one program a tile; GROUP_M row tiles walk along N together."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    rows = tl.load(rows_ptr)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tile = tl.program_id(0)
    if tile < tiles_m * tiles_n:
        first = tile // (GROUP_M * tiles_n) * GROUP_M
        height = min(tiles_m - first, GROUP_M)
        m0 = (first + (tile % (GROUP_M * tiles_n)) % height) * BLOCK_M
        n0 = ((tile % (GROUP_M * tiles_n)) // height) * BLOCK_N
        total = _node(x_desc, w_desc, m0, n0, LEAF_K, 0, LEAVES, BLOCK_M, BLOCK_N, BLOCK_K)
        m = m0 + tl.arange(0, BLOCK_M)
        n = n0 + tl.arange(0, BLOCK_N)
        if BIASED:
            total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        at = y_ptr + m[:, None].to(tl.int64) * N + n[None, :]
        tl.store(at, total.to(y_ptr.dtype.element_ty), mask=(m[:, None] < rows) & (n[None, :] < N))
