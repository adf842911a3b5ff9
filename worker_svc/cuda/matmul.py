"""Matrix products y = x @ w.T whose bits depend on a row of x and on w alone.

Knows the two Triton kernels and how to launch one from a `Tile`; a third, for Hopper, is `matmul_hopper.py`'s. Which
tile a shape gets is `tuning.py`'s business. Does not know layers. Invariant: K is accumulated in ascending order in
one fp32 accumulator and rounded once, so every tile, and every number of rows, gives the same bits (measured for
mma.sync and wgmma, pointer and TMA loads alike).

Legend: M rows, N outputs, K inputs. The number of rows is read from the device, so one captured launch serves every
step of its bucket: rows past it cost nothing.

Gated weights (`gated=True`) hold gate and up rows interleaved in groups of 8: rows 16i .. 16i+7 are gate rows
8i .. 8i+7, rows 16i+8 .. 16i+15 the up rows of the same outputs. Whatever the tile, a thread then owns both halves
of an output and silu(gate) * up needs no exchange. The halves are rounded to the activations' type first: the same
bits as a product, then `activation.silu_mul`.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from worker_svc.cuda import matmul_hopper
from worker_svc.cuda.hopper import processors
from worker_svc.cuda.matmul_hopper import Unnormed

GATE_GROUP = 8


@dataclass(frozen=True, slots=True)
class Tile:
    """How one launch is cut; never a choice that bits depend on.

    persistent: TMA loads and stores over a fixed grid, for many rows. Otherwise one program a tile, for few rows.
    kind: "triton" for the kernels here, "hopper" for `matmul_hopper.py`, where there is one; elsewhere `twin`.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    persistent: bool = False
    group_m: int = 8
    prefetch_k: int = 0  # columns of w asked into L2 before the input is there; needs dependent launches
    kind: str = "triton"
    programs: int = 1  # a processor; hopper only

    def twin(self) -> "Tile":
        """A tile of Triton's kernels for the rows of this one."""
        return self if self.kind == "triton" else Tile(max(16, min(self.block_m, 128)), 64, 64, 4, 4)


@triton.jit
def silu_times_up(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TYPE: tl.constexpr):
    pairs = tl.permute(tl.reshape(acc, (BLOCK_M, BLOCK_N // 16, 2, 8)), (0, 1, 3, 2))
    gate, up = tl.split(pairs)
    gate = gate.to(TYPE).to(tl.float32)
    up = up.to(TYPE).to(tl.float32)
    return tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, (BLOCK_M, BLOCK_N // 2))


@triton.jit
def prefetch_rows(
    pointer, row_bytes, first_row, num_rows, ROWS: tl.constexpr, BYTES: tl.constexpr, LANES: tl.constexpr
):
    """Ask L2 for the first BYTES of each of ROWS rows of a table; nothing waits for it.

    Each of the program's LANES threads asks for a piece of its own: a smaller tensor would have threads ask twice.
    """
    PIECES: tl.constexpr = LANES // ROWS if ROWS < LANES else 1
    lane = tl.arange(0, ROWS * PIECES)
    row = tl.minimum(first_row + lane // PIECES, num_rows - 1).to(tl.int64)
    address = pointer.to(tl.int64) + row * row_bytes + lane % PIECES * (BYTES // PIECES)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [address, tl.full([ROWS * PIECES], BYTES // PIECES, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def few_rows_kernel(
    x_desc,
    w_desc,
    w_ptr,
    y_ptr,
    bias_ptr,
    rows_ptr,
    N,
    K,
    y_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    PREFETCH_K: tl.constexpr,
    LANES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a tile of [BLOCK_M, BLOCK_N]; the row tiles of one column tile are neighbours and share it in L2."""
    n0 = tl.program_id(1) * BLOCK_N
    m0 = tl.program_id(0) * BLOCK_M
    if DEPENDENT:
        gdc_launch_dependents()
        if PREFETCH_K:
            prefetch_rows(w_ptr, K * 2, n0, N, BLOCK_N, PREFETCH_K * 2, LANES)
        gdc_wait()
    rows = tl.load(rows_ptr)
    if m0 < rows:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = tl.dot(x_desc.load([m0, k]), w_desc.load([n0, k]).T, acc)
        m = m0 + tl.arange(0, BLOCK_M)
        if GATED:
            out = silu_times_up(acc, BLOCK_M, BLOCK_N, x_desc.dtype)
            n = n0 // 2 + tl.arange(0, BLOCK_N // 2)
            live = (m[:, None] < rows) & (n[None, :] < N // 2)
        else:
            n = n0 + tl.arange(0, BLOCK_N)
            out = acc
            if BIASED:
                out += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            live = (m[:, None] < rows) & (n[None, :] < N)
        at = y_ptr + m[:, None].to(tl.int64) * y_stride + n[None, :]
        tl.store(at, out.to(y_ptr.dtype.element_ty), mask=live)


@triton.jit
def many_rows_kernel(
    x_desc,
    w_desc,
    y_desc,
    bias_ptr,
    rows_ptr,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    PROGRAMS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """PROGRAMS programs share the tiles; GROUP_M row tiles walk along N together, so that both operands stay in L2."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    rows = tl.load(rows_ptr)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        group = tile // (GROUP_M * tiles_n)
        first = group * GROUP_M
        height = min(tiles_m - first, GROUP_M)
        m0 = (first + (tile % (GROUP_M * tiles_n)) % height) * BLOCK_M
        n0 = ((tile % (GROUP_M * tiles_n)) // height) * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = tl.dot(x_desc.load([m0, k]), w_desc.load([n0, k]).T, acc)
        if GATED:
            y_desc.store([m0, n0 // 2], silu_times_up(acc, BLOCK_M, BLOCK_N, x_desc.dtype).to(y_desc.dtype))
        else:
            if BIASED:
                n = n0 + tl.arange(0, BLOCK_N)
                acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            y_desc.store([m0, n0], acc.to(y_desc.dtype))


def linear(
    x: torch.Tensor | Unnormed,
    w: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor,
    tile: Tile,
    *,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    dependent: bool = False,
    late: bool = False,
) -> bool:
    """out[:rows] = x[:rows] @ w.T (+ bias [N]), rounded once to out's type.

    Args:
        x: [M, K], M the bucket's height; still to be normed only with a tile of `matmul_hopper.norming`.
        w: [N, K], or [2 * N, K] with gate and up rows interleaved when `gated`.
        out: [M, N]; rows past the count are not written by the kernel for few rows, and hold anything otherwise.
        rows: [1] int32 on the device, at most M.
        dependent: launch before the kernel before it has ended (programmatic dependent launch).
        late: let the kernel after this one begin only when those before this one have ended, where that can be had.

    Returns: whether it could.
    """
    if tile.kind == "hopper":
        if isinstance(x, Unnormed) or matmul_hopper.fits(x, w, out, tile, gated=gated):
            count = processors(w.device.index or 0)
            matmul_hopper.linear(x, w, out, rows, tile, count, bias=bias, gated=gated, dependent=dependent, late=late)
            return late
        tile = tile.twin()
    assert isinstance(x, torch.Tensor), "no other kernel norms its rows"
    height, k = x.shape
    n = w.shape[0]
    if tile.persistent and out.stride(0) * out.element_size() % 16:
        tile = replace(tile, persistent=False)  # the copy engine stores rows at multiples of 16 bytes only
    x_desc = TensorDescriptor(x, [height, k], [x.stride(0), 1], [tile.block_m, tile.block_k])
    w_desc = TensorDescriptor(w, [n, k], [w.stride(0), 1], [tile.block_n, tile.block_k])
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    if dependent:
        options["launch_pdl"] = True
    if tile.persistent:
        shape = [height, out.shape[1]]
        y_desc = TensorDescriptor(out, shape, [out.stride(0), 1], [tile.block_m, tile.block_n // (2 if gated else 1)])
        tiles = triton.cdiv(height, tile.block_m) * triton.cdiv(n, tile.block_n)
        programs = min(processors(x.device.index or 0), tiles) if x.is_cuda else min(3, tiles)
        many_rows_kernel[(programs,)](
            x_desc, w_desc, y_desc, w if bias is None else bias, rows, n, k,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m,
            GATED=gated, BIASED=bias is not None, PROGRAMS=programs, DEPENDENT=dependent, **options,
        )  # fmt: skip
        return False
    few_rows_kernel[(triton.cdiv(height, tile.block_m), triton.cdiv(n, tile.block_n))](
        x_desc, w_desc, w, out, w if bias is None else bias, rows, n, k, out.stride(0),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        GATED=gated, BIASED=bias is not None, PREFETCH_K=tile.prefetch_k,
        LANES=32 * tile.warps, DEPENDENT=dependent, **options,
    )  # fmt: skip
    return False


def interleave_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """[2 * I, K], gate rows then up rows -> the interleaved rows that a gated product reads."""
    gate, up = gate_up.chunk(2)
    width = gate_up.shape[1]
    pairs = torch.stack((gate.reshape(-1, GATE_GROUP, width), up.reshape(-1, GATE_GROUP, width)), 1)
    return pairs.reshape(gate_up.shape).contiguous()
