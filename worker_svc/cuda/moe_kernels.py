"""Kernels of a mixture of experts: the experts' two products, and what combines them.

Know rows of activations and lists of (token, slot) pairs; nothing of layers or batches. Invariant: the bits of a
token's answer depend on its row and the weights alone. Products accumulate K in ascending order in one fp32 accumulator
and are rounded once (`matmul.py`), so tiles are free; answers are added slot after slot in fp32. An expert's list holds
its pairs in order of arrival, which changes from run to run: no bit depends on it, since rows of a product are
independent and each answer is stored under its pair.

Legend: T tokens, S slots (experts a token), X experts, D hidden width, I an expert's inner width, P = T * S pairs; pair
p is slot p % S of token p // S.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker_svc.cuda.matmul import prefetch_rows, silu_times_up
from worker_svc.cuda.moe_route_kernels import ranked, shares
from worker_svc.cuda.rows import normed


@triton.jit
def _tile(index, counts, EXPERTS: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_M: tl.constexpr):
    """Tile `index` of all experts' lists, cut every BLOCK_M: (expert, length of its list, pairs of experts before it,
    first place in its list). The expert is at least EXPERTS where there is no such tile."""
    x = tl.arange(0, BLOCK_X)
    count = tl.load(counts + x, mask=x < EXPERTS, other=0)
    tiles = (count + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= index).to(tl.int32), 0)
    length = tl.sum(tl.where(x == expert, count, 0), 0)
    before = tl.sum(tl.where(x < expert, count, 0), 0)
    first = (index - tl.sum(tl.where(x < expert, tiles, 0), 0)) * BLOCK_M
    return expert, length, before, first


@triton.jit(do_not_specialize=["capacity", "num_tiles"])
def experts_kernel(x_ptr, x_desc, w_desc, w_ptr, out, counts, lists, ids, parts, weights, rows_ptr, N, K, capacity,
                   num_tiles, PIECES: tl.constexpr, RENORMALISE: tl.constexpr,
                   EXPERTS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_X: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
                   GATED: tl.constexpr, GROUPED: tl.constexpr, EVEN_K: tl.constexpr,
                   PREFETCH_K: tl.constexpr, LANES: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """One program a tile of [BLOCK_M pairs of one expert, BLOCK_N of its N outputs].

    Pairs stand in the order of the experts' lists: rank r. GATED: rows of x are tokens, gathered by pair; out [P, I] is
    silu(gate) * up by rank. Otherwise rows of x are ranks, and out [P, N] is stored by pair. Not GROUPED: every pair is
    a tile of its own, and its rank is its number. GROUP_M tiles walk along N together, so that an expert's weights and
    its rows stay in the cache.

    PIECES, of a lone pair's gate and up: nobody has chosen experts yet. Each program chooses its own from `parts`
    (`ranked`); the first one of a pair notes it in `ids` and `weights`, for those who come after.

    PREFETCH_K columns of the weights of a lone pair are asked into L2 before the input is there. The pair's expert is
    known by then, as the product before lets its dependents start only once it has seen the router's end; the hint is
    read again when it counts.
    """
    if DEPENDENT and GATED:
        gdc_wait()
        if not PIECES:
            gdc_launch_dependents()
    tiles_n = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    start = program // (GROUP_M * tiles_n) * GROUP_M
    height = min(num_tiles - start, GROUP_M)
    index = start + program % (GROUP_M * tiles_n) % height
    n0 = program % (GROUP_M * tiles_n) // height * BLOCK_N
    if DEPENDENT and not GATED:
        gdc_launch_dependents()
        if PREFETCH_K:
            hint = tl.load(ids + index, cache_modifier=".cg")
            hint = tl.minimum(tl.maximum(hint, 0), EXPERTS - 1)
            prefetch_rows(w_ptr, K * 2, hint * N + n0, EXPERTS * N, BLOCK_N, PREFETCH_K * 2, LANES)
        gdc_wait()
    if GROUPED:
        expert, length, before, first = _tile(index, counts, EXPERTS, BLOCK_X, BLOCK_M)
    elif PIECES:
        wanted = index < tl.load(rows_ptr) * SLOTS
        order, powers = ranked(parts, index // SLOTS, capacity, PIECES, EXPERTS, BLOCK_X, LANES)
        mine = order == index % SLOTS
        expert = tl.sum(tl.where(mine, tl.arange(0, BLOCK_X), 0), 0)
        if n0 == 0:
            share = shares(order, powers, SLOTS, RENORMALISE)
            tl.store(weights + index + order * 0, share, mask=mine & wanted)
            tl.store(ids + index, expert, mask=wanted)
        expert = tl.where(wanted, expert, EXPERTS)
        length, before, first = 1, index, 0
        if DEPENDENT:
            gdc_launch_dependents()
    else:
        expert = tl.load(ids + index, mask=index < tl.load(rows_ptr) * SLOTS, other=EXPERTS)
        length, before, first = 1, index, 0
    if expert < EXPERTS:
        place = first + tl.arange(0, BLOCK_M)
        live = place < length
        if GROUPED:
            pair = tl.load(lists + expert.to(tl.int64) * capacity + place, mask=live, other=0)
        else:
            pair = index + place
        rank = before + place
        row0 = expert * N + n0
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if GATED:
            columns = tl.arange(0, BLOCK_K)
            at = x_ptr + (pair // SLOTS).to(tl.int64)[:, None] * K + columns[None, :]
            for k in range(0, K, BLOCK_K):
                if EVEN_K:
                    x = tl.load(at + k, mask=live[:, None], other=0.0)
                else:
                    x = tl.load(at + k, mask=live[:, None] & (k + columns < K)[None, :], other=0.0)
                acc = tl.dot(x, w_desc.load([row0, k]).T, acc)
            n = n0 // 2 + tl.arange(0, BLOCK_N // 2)
            to = out + rank.to(tl.int64)[:, None] * (N // 2) + n[None, :]
            answer = silu_times_up(acc, BLOCK_M, BLOCK_N, x_desc.dtype)
            tl.store(to, answer.to(out.dtype.element_ty), mask=live[:, None] & (n < N // 2)[None, :])
        else:
            for k in range(0, K, BLOCK_K):
                acc = tl.dot(x_desc.load([before + first, k]), w_desc.load([row0, k]).T, acc)
            n = n0 + tl.arange(0, BLOCK_N)
            to = out + pair.to(tl.int64)[:, None] * N + n[None, :]
            tl.store(to, acc.to(out.dtype.element_ty), mask=live[:, None] & (n < N)[None, :])


@triton.jit
def _combined(answers, weights, t, c, live, width, SLOTS: tl.constexpr):
    """The sum over slots, ascending, of weight x answer, of columns c of token t."""
    at = answers + t.to(tl.int64) * SLOTS * width + c
    total = tl.load(at, mask=live, other=0.0).to(tl.float32) * tl.load(weights + t * SLOTS)
    for s in tl.static_range(1, SLOTS):
        answer = tl.load(at + s * width, mask=live, other=0.0).to(tl.float32)
        total = tl.fma(answer, tl.load(weights + t * SLOTS + s), total)
    return total


@triton.jit
def _forget(counts, EXPERTS: tl.constexpr, BLOCK_X: tl.constexpr):
    """Empty the lists for the next step; nobody reads them any more."""
    x = tl.arange(0, BLOCK_X)
    tl.store(counts + x, tl.zeros((BLOCK_X,), tl.int32), mask=x < EXPERTS)


@triton.jit
def combine_kernel(answers, weights, out, counts, count_ptr, width, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
                   BLOCK_X: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """out [T, D]: answers [P, D] combined, in out's type."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0)
    if t == 0:
        _forget(counts, EXPERTS, BLOCK_X)
    if t < tl.load(count_ptr):
        c = tl.arange(0, BLOCK)
        live = c < width
        total = _combined(answers, weights, t, c, live, width, SLOTS)
        tl.store(out + t.to(tl.int64) * width + c, total.to(out.dtype.element_ty), mask=live)


@triton.jit
def combine_norm_kernel(answers, weights, residual, scale, out, counts, count_ptr, width, epsilon,
                        EXPERTS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK: tl.constexpr,
                        DEPENDENT: tl.constexpr):  # fmt: skip
    """`combine_kernel` and then `rows.add_norm_kernel`, with their bits: the combination is rounded before it is added
    to the residual."""
    if DEPENDENT:
        gdc_launch_dependents()
    t = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    live = c < width
    factor = tl.load(scale + c, mask=live, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_wait()
    if t == 0:
        _forget(counts, EXPERTS, BLOCK_X)
    at = t.to(tl.int64) * width + c
    number = tl.load(count_ptr)
    if not DEPENDENT:  # otherwise there are few rows, and their loads need not wait for the number
        live = live & (t < number)
    before = tl.load(residual + at, mask=live, other=0.0).to(tl.float32)
    row = _combined(answers, weights, t, c, live, width, SLOTS).to(out.dtype.element_ty).to(tl.float32)
    if t < number:
        row += before
        rounded = row.to(out.dtype.element_ty)
        tl.store(residual + at, rounded, mask=live)
        tl.store(out + at, normed(rounded.to(tl.float32), factor, width, epsilon).to(out.dtype.element_ty), mask=live)
