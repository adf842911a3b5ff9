# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Collectives over memory that ranks share: each writes its part at home, says so, and reads the others'.

Knows what lies where in a rank's region and when it may be read or written again. Does not know tensors' meaning or who
launches. Invariant: a sum adds leaves in the order of `ops/leaves.py`, so its bits are those of `leaves.fold`, whatever
the number of elements, ranks and programs.

A rank's region (addresses by rank are in `table`, then the address of two words of the host):

    [2, PROGRAMS, RANKS] int32 pads | slot 0 | slot 1

Every launch is a call, counted by each of its PROGRAMS programs in this rank's `state`, so that a captured launch may
be replayed ([PROGRAMS] calls so far, then one word: 1 once the host has ended the group, 2 once a wait took too
long). All ranks make the same calls.
Program p reads of its peers only what their programs p have written:

    write part to own slot (call & 1) -> pads[0, p, rank] of every peer = call -> wait for all of own pads[0, p] -> read

A slot is written again two calls later. By then every peer has ended the call between, some program of which waited for
us; it began when the one before it had ended. So nobody reads the slot any more.

A wait ends without its word when the host has written to its first word, or after `limit_ns`, which the second word
then says; what comes out then means nothing, and later calls do not wait at all.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

RANKS = 8  # at most
ASK_HOST_EVERY = 256  # looks at a pad: the host's memory is far


def pad_bytes(programs: int) -> int:
    return 2 * programs * RANKS * 4


@triton.jit
def _slot(table, rank, call, slot_bytes, PADS: tl.constexpr):
    """Where the slot of a call begins in a rank's region, as bytes."""
    region = tl.load(table + rank).to(tl.pointer_type(tl.int8))
    return region + PADS + (call & 1).to(tl.int64) * slot_bytes


@triton.jit
def _elements(at, TYPE: tl.constexpr):
    return tl.multiple_of(at.to(tl.pointer_type(TYPE)), 16 * 8 // TYPE.primitive_bitwidth)


@triton.jit
def _tell(table, program, call, PHASE: tl.constexpr, RANK: tl.constexpr, TP: tl.constexpr, PROGRAMS: tl.constexpr,
          RANKS: tl.constexpr):  # fmt: skip
    """What all threads of this program have written can be read by programs that see the word."""
    tl.debug_barrier()
    for peer in tl.static_range(TP):
        pads = tl.load(table + peer).to(tl.pointer_type(tl.int32))
        at = pads + (PHASE * PROGRAMS + program) * RANKS + RANK
        tl.atomic_xchg(at, call, sem="release", scope="sys")


@triton.jit
def _wait(table, state, program, call, limit_ns, PHASE: tl.constexpr, RANK: tl.constexpr, TP: tl.constexpr,
          PROGRAMS: tl.constexpr, RANKS: tl.constexpr, ASK_EVERY: tl.constexpr, TIMED: tl.constexpr):  # fmt: skip
    """Until every peer's word of this call is here. What decides is read once for all threads, hence by atomics."""
    own = tl.load(table + RANK).to(tl.pointer_type(tl.int32)) + (PHASE * PROGRAMS + program) * RANKS
    words = tl.load(table + TP).to(tl.pointer_type(tl.int32))
    lost = tl.atomic_max(state + PROGRAMS, 0, sem="relaxed")
    began = globaltimer() if TIMED else 0
    for peer in tl.static_range(TP):
        looks = 0
        behind = tl.atomic_add(own + peer, 0, sem="acquire", scope="sys") - call
        while (behind < 0) & (lost == 0):  # a difference: counts may wrap
            looks += 1
            if looks % ASK_EVERY == 0:
                ends = tl.atomic_add(words, 0, sem="relaxed", scope="sys")
                if TIMED:
                    ends = tl.maximum(ends, tl.where(globaltimer() - began > limit_ns, 2, 0))
                lost = tl.atomic_max(state + PROGRAMS, ends, sem="relaxed")  # as it was: seen at the next look
            behind = tl.atomic_add(own + peer, 0, sem="acquire", scope="sys") - call
    if lost > 1:
        tl.store(words + 1, 1)
    tl.debug_barrier()


@triton.jit
def _leaf(x, table, call, slot_bytes, at, live, stride, LEAF: tl.constexpr, EACH: tl.constexpr, PADS: tl.constexpr):
    """Leaf LEAF of all: x's own if EACH is 0, else in the slot of the rank that holds EACH of them."""
    if EACH == 0:
        value = tl.load(x + LEAF * stride + at, mask=live, other=0.0)
    else:
        slot = _elements(_slot(table, LEAF // EACH, call, slot_bytes, PADS), tl.float32)
        value = tl.load(slot + LEAF % EACH * stride + at, mask=live, other=0.0)
    return value


@triton.jit
def fold_leaves(x, table, call, slot_bytes, at, live, stride, FIRST: tl.constexpr, COUNT: tl.constexpr,
                EACH: tl.constexpr, PADS: tl.constexpr):  # fmt: skip
    """`leaves.fold` of COUNT leaves from FIRST on, at elements `at`; leaves are `stride` elements apart."""
    if COUNT == 1:
        total = _leaf(x, table, call, slot_bytes, at, live, stride, FIRST, EACH, PADS)
    elif COUNT % 2 == 0:
        HALF: tl.constexpr = COUNT // 2
        total = fold_leaves(x, table, call, slot_bytes, at, live, stride, FIRST, HALF, EACH, PADS) + fold_leaves(
            x, table, call, slot_bytes, at, live, stride, FIRST + HALF, HALF, EACH, PADS
        )
    else:
        total = _leaf(x, table, call, slot_bytes, at, live, stride, FIRST, EACH, PADS)
        for leaf in tl.static_range(1, COUNT):
            total += _leaf(x, table, call, slot_bytes, at, live, stride, FIRST + leaf, EACH, PADS)
    return total


@triton.jit
def gather_kernel(x, out, table, state, count, out_stride, slot_bytes, limit_ns, RANK: tl.constexpr, TP: tl.constexpr,
                  PROGRAMS: tl.constexpr, RANKS: tl.constexpr, ASK_EVERY: tl.constexpr, TIMED: tl.constexpr,
                  BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """out[r * out_stride + i] = rank r's x[i] for i below count; words of any type."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    PADS: tl.constexpr = 2 * PROGRAMS * RANKS * 4
    TYPE: tl.constexpr = x.dtype.element_ty
    program = tl.program_id(0)
    call = tl.load(state + program) + 1
    if program * BLOCK < count:
        own = _elements(_slot(table, RANK, call, slot_bytes, PADS), TYPE)
        for start in range(program * BLOCK, count, PROGRAMS * BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(own + at, tl.load(x + at, mask=at < count, other=0), mask=at < count)
        _tell(table, program, call, 0, RANK, TP, PROGRAMS, RANKS)
        _wait(table, state, program, call, limit_ns, 0, RANK, TP, PROGRAMS, RANKS, ASK_EVERY, TIMED)
        for start in range(program * BLOCK, count, PROGRAMS * BLOCK):
            at = start + tl.arange(0, BLOCK)
            for peer in tl.static_range(TP):
                slot = _elements(_slot(table, peer, call, slot_bytes, PADS), TYPE)
                part = tl.load(slot + at, mask=at < count, other=0)
                tl.store(out + peer * out_stride + at, part, mask=at < count)
    tl.store(state + program, call)


@triton.jit
def sum_kernel(x, out, bias, table, state, count, x_stride, width, slot_bytes, limit_ns, RANK: tl.constexpr,
               TP: tl.constexpr, OWN: tl.constexpr, EACH: tl.constexpr, BIASED: tl.constexpr, TWICE: tl.constexpr,
               PROGRAMS: tl.constexpr, RANKS: tl.constexpr, ASK_EVERY: tl.constexpr, TIMED: tl.constexpr,
               BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """out[i] = the fold of all ranks' leaves (+ bias[i % width]), rounded once, for i below count.

    x holds OWN leaves of fp32, x_stride elements apart. EACH of them are exchanged: 1 when they are a node of the tree,
    and then folded first, else all. TWICE: a rank adds a slice, rounds it, and the slices are exchanged (two waits and
    less to read); otherwise every rank adds everything.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    PADS: tl.constexpr = 2 * PROGRAMS * RANKS * 4
    TYPE: tl.constexpr = out.dtype.element_ty
    program = tl.program_id(0)
    call = tl.load(state + program) + 1
    # A slice is what one rank adds; a program has the same places in every slice.
    SLICES: tl.constexpr = TP if TWICE else 1
    slice_size = tl.cdiv(tl.cdiv(count, TP), BLOCK) * BLOCK if TWICE else count
    if program * BLOCK < slice_size:
        own = _elements(_slot(table, RANK, call, slot_bytes, PADS), tl.float32)
        for start in range(program * BLOCK, slice_size, PROGRAMS * BLOCK):
            for piece in tl.static_range(SLICES):
                at = piece * slice_size + start + tl.arange(0, BLOCK)
                live = (start + tl.arange(0, BLOCK) < slice_size) & (at < count)
                if EACH == 1:
                    part = fold_leaves(x, table, call, slot_bytes, at, live, x_stride, 0, OWN, 0, PADS)
                    tl.store(own + at, part, mask=live)
                else:
                    for leaf in tl.static_range(OWN):
                        part = tl.load(x + leaf * x_stride + at, mask=live, other=0.0)
                        tl.store(own + leaf * count + at, part, mask=live)
        _tell(table, program, call, 0, RANK, TP, PROGRAMS, RANKS)
        _wait(table, state, program, call, limit_ns, 0, RANK, TP, PROGRAMS, RANKS, ASK_EVERY, TIMED)
        mine = RANK * slice_size if TWICE else slice_size * 0
        slot = _slot(table, RANK, call, slot_bytes, PADS)
        for start in range(program * BLOCK, slice_size, PROGRAMS * BLOCK):
            local = start + tl.arange(0, BLOCK)
            at = mine + local
            live = (local < slice_size) & (at < count)
            total = fold_leaves(x, table, call, slot_bytes, at, live, count, 0, TP * EACH, EACH, PADS)
            if BIASED:
                total += tl.load(bias + at % width, mask=live, other=0.0).to(tl.float32)
            if TWICE:
                # Over what has just been added: of its own slot's own slice a rank is the only reader, and of this
                # block this program.
                tl.debug_barrier()
                rounded = _elements(slot + (mine + start).to(tl.int64) * 4, TYPE)
                tl.store(rounded + tl.arange(0, BLOCK), total.to(TYPE), mask=live)
            else:
                tl.store(out + at, total.to(TYPE), mask=live)
        if TWICE:
            _tell(table, program, call, 1, RANK, TP, PROGRAMS, RANKS)
            _wait(table, state, program, call, limit_ns, 1, RANK, TP, PROGRAMS, RANKS, ASK_EVERY, TIMED)
            for start in range(program * BLOCK, slice_size, PROGRAMS * BLOCK):
                for peer in tl.static_range(TP):
                    block = peer * slice_size + start
                    at = block + tl.arange(0, BLOCK)
                    live = (start + tl.arange(0, BLOCK) < slice_size) & (at < count)
                    theirs = _elements(_slot(table, peer, call, slot_bytes, PADS) + block.to(tl.int64) * 4, TYPE)
                    tl.store(out + at, tl.load(theirs + tl.arange(0, BLOCK), mask=live, other=0.0), mask=live)
    tl.store(state + program, call)


@triton.jit
def fold_kernel(x, out, bias, count, x_stride, width, LEAVES: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr,
                DEPENDENT: tl.constexpr):  # fmt: skip
    """out[i] = the fold of x's LEAVES leaves (+ bias[i % width]), rounded once: one rank alone."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    total = fold_leaves(x, x, 0, 0, at, live, x_stride, 0, LEAVES, 0, 0)
    if BIASED:
        total += tl.load(bias + at % width, mask=live, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=live)
