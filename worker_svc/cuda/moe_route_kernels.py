# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Kernels of a router: logits in pieces of the width, and the choice of experts from them.

Know rows of activations and experts by number; nothing of layers or batches. Invariant: the bits of a token's choice
depend on its row and the router alone. A logit is a sum over pieces of PIECE columns: K in order within one, from
zero, pieces in ascending order; so pieces may be made by programs of their own, and a chain of products is short. What
powers add up to is a sum of integers, which has no order: it needs no layout of its own, and whoever needs an expert
may choose it again.

Legend: T tokens, S slots (experts a token), X experts, D hidden width, B pieces whose sums are still apart.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker_svc.cuda.rows import inverse_rms

UNIT = tl.constexpr(4294967296.0)  # powers are counted in parts of it


@triton.jit
def logits_kernel(x_desc, w_desc, parts, rows_ptr, D, EXPERTS: tl.constexpr, BLOCK_X: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PIECE: tl.constexpr,
                  DEPENDENT: tl.constexpr):  # fmt: skip
    """Program i: logits of BLOCK_M tokens, pieces added: parts [1, T, X] fp32."""
    m0 = tl.program_id(0) * BLOCK_M
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    rows = tl.load(rows_ptr)
    if m0 < rows:
        logits = tl.zeros((BLOCK_M, BLOCK_X), tl.float32)
        for k in range(0, D, PIECE):
            part = tl.zeros((BLOCK_M, BLOCK_X), tl.float32)
            for step in tl.static_range(PIECE // BLOCK_K):
                at = k + step * BLOCK_K
                part = tl.dot(x_desc.load([m0, at]), w_desc.load([0, at]).T, part, input_precision="ieee")
            logits = _added(logits, part)
        m = m0 + tl.arange(0, BLOCK_M)
        x = tl.arange(0, BLOCK_X)
        tl.store(parts + m[:, None] * EXPERTS + x[None, :], logits, mask=(m < rows)[:, None] & (x < EXPERTS)[None, :])


@triton.jit
def norm_logits_kernel(update, residual, scale, w, total, out, parts, rows_ptr, D, capacity, epsilon,
                       EXPERTS: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
                       DEPENDENT: tl.constexpr):  # fmt: skip
    """Program (t, b): piece b of `rows.add_norm_kernel`'s rows of token t and of its logits, with the bits of both.

    total: update + residual, rounded, elsewhere than the residual, which other programs still read. Each norms the
    row for itself. A piece of the router is loaded before the input is there. parts: [B, T, X], T = capacity.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    t = tl.program_id(0)
    b = tl.program_id(1)
    c = tl.arange(0, BLOCK)
    k = b * PIECE + tl.arange(0, PIECE)
    x = tl.arange(0, BLOCK_X)
    router = tl.load(w + x[:, None] * D + k[None, :], mask=(x < EXPERTS)[:, None] & (k < D)[None, :], other=0.0)
    factor = tl.load(scale + k, mask=k < D, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_wait()
    at = t.to(tl.int64) * D
    live = t < tl.load(rows_ptr)
    row = tl.load(update + at + c, mask=c < D, other=0.0).to(tl.float32)
    row += tl.load(residual + at + c, mask=c < D, other=0.0).to(tl.float32)
    piece = tl.load(update + at + k, mask=k < D, other=0.0).to(tl.float32)
    piece += tl.load(residual + at + k, mask=k < D, other=0.0).to(tl.float32)
    if live:
        inverse = inverse_rms(row.to(out.dtype.element_ty).to(tl.float32), D, epsilon)
        rounded = piece.to(out.dtype.element_ty)
        y = (rounded.to(tl.float32) * inverse * factor).to(out.dtype.element_ty)
        tl.store(total + at + k, rounded, mask=k < D)
        tl.store(out + at + k, y, mask=k < D)
        # A product has 16 rows at least: the token's, 16 times.
        logits = tl.dot(tl.broadcast_to(y[None, :], (16, PIECE)), router.T, input_precision="ieee")
        m = tl.arange(0, 16)
        to = parts + (b * capacity + t) * EXPERTS + m[:, None] * 0 + x[None, :]
        tl.store(to, logits, mask=(m == 0)[:, None] & (x < EXPERTS)[None, :])


@triton.jit
def choose_kernel(parts, ids, weights, counts, lists, rows_ptr, capacity, PIECES: tl.constexpr,
                  EXPERTS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_S: tl.constexpr,
                  RENORMALISE: tl.constexpr, GROUPED: tl.constexpr, LANES: tl.constexpr,
                  DEPENDENT: tl.constexpr):  # fmt: skip
    """Program t: the SLOTS largest experts of token t, ties to the lower id. ids, weights: [T, S].

    GROUPED: each pair is appended to its expert's list, `lists` [X, capacity], whose length is in `counts` [X], zero
    before. A row with NaN chooses experts all the same and weighs them with NaN.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0)
    if t < tl.load(rows_ptr):
        x = tl.arange(0, BLOCK_X)
        rank, powers = ranked(parts, t, capacity, PIECES, EXPERTS, BLOCK_X, LANES)
        slot = tl.arange(0, BLOCK_S)
        at = rank[None, :] == slot[:, None]
        chosen = tl.sum(tl.where(at, x[None, :], 0), 1)
        pair = t * SLOTS + slot
        tl.store(ids + pair, chosen, mask=slot < SLOTS)
        tl.store(weights + t * SLOTS + rank, shares(rank, powers, SLOTS, RENORMALISE), mask=rank < SLOTS)
        if GROUPED:
            place = tl.atomic_add(counts + chosen, 1, mask=slot < SLOTS, sem="relaxed")
            tl.store(lists + chosen.to(tl.int64) * capacity + place, pair, mask=slot < SLOTS)


@triton.jit
def ranked(parts, t, capacity, PIECES: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_X: tl.constexpr,
           LANES: tl.constexpr):  # fmt: skip
    """(rank, power) [X] of each expert for token t: how many come before it, and exp(logit - largest), NaN in a row
    with NaN. A key holds a power's bits above the id's complement, so ties go to the lower.

    Each of the program's LANES threads loads an expert's pieces, perhaps one that others load too: of a smaller tensor
    the compiler would have every thread load all that it compares.
    """
    COPIES: tl.constexpr = LANES // BLOCK_X if BLOCK_X < LANES else 1
    lane = tl.arange(0, COPIES * BLOCK_X)
    copies = tl.zeros((COPIES * BLOCK_X,), tl.float32)
    for b in tl.static_range(PIECES):
        at = parts + (b * capacity + t) * EXPERTS + lane % BLOCK_X
        copies = _added(copies, tl.load(at, mask=lane % BLOCK_X < EXPERTS, other=0.0))
    x = tl.arange(0, BLOCK_X)
    logits = tl.max(tl.reshape(copies, (COPIES, BLOCK_X)), 0)
    logits = tl.where(x < EXPERTS, logits, float("-inf"))
    powers = tl.exp(logits - tl.max(logits, 0))
    wrong = tl.max((powers != powers).to(tl.int32), 0) > 0
    known = tl.where(wrong, 0.0, powers)
    keys = (known.to(tl.int32, bitcast=True).to(tl.int64) << 32) + (BLOCK_X - 1 - x)
    rank = tl.sum((keys[:, None] > keys[None, :]).to(tl.int32), 0)
    return rank, tl.where(wrong, float("nan"), powers)


@triton.jit
def shares(rank, powers, SLOTS: tl.constexpr, RENORMALISE: tl.constexpr):
    """[X]: each expert's share of all experts' powers, or of the chosen ones' (RENORMALISE)."""
    units = (tl.where(powers == powers, powers, 0.0) * UNIT).to(tl.int64)
    if RENORMALISE:
        units = tl.where(rank < SLOTS, units, 0)
    return powers / (tl.sum(units, 0).to(tl.float32) / UNIT)


@triton.jit
def _added(total, part):
    """total + part. As an addition after a product from zero the compiler would make one chain of both."""
    return tl.fma(part, 1.0, total)
