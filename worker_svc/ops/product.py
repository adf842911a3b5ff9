"""A matrix product of our own for CPUs: fp32 or bfloat16 weights, every sum in fp32, one expression everywhere.

Knows how a weight is packed, how a product is cut into chunks, and what is rounded. Does not know layers or ranks.
Invariant: output n of row m is, for each leaf, `acc = fma(x[m, k], w[n, k], acc)` over the leaf's k in ascending order
from zero; the leaves are folded in the order of `leaves.py`; bias added; rounded once, to nearest, ties to even.
Nothing in it depends on other rows, on the columns beside it, on tiles, threads or the processor. `plain_product.py`
is the twin. Importing fails where numba is absent.

Legend: M rows, N outputs, K inputs, L leaves, P panels of 16 outputs.
"""

from array import array
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from worker_svc.ops import product_loops as loops
from worker_svc.ops.companion import companion
from worker_svc.ops.edges import edges
from worker_svc.ops.packing import turn_into_panels
from worker_svc.ops.tiles import LANES, tiles

BLOCK_FLOATS = 1 << 16  # of rows that a chunk holds beside the panels it reads: half of a small second-level cache
CHUNK_WORK = 800_000  # multiplications, about 15 us
CHUNKS_A_THREAD = 8
MOST_PLANS = 256


@dataclass(frozen=True, eq=False, slots=True)
class PackedWeight:
    """panels [P, K, 16]; of a gated weight the gate's panels, then as many of up."""

    panels: Tensor
    bias: Tensor | None  # [P * 16] fp32
    num_outputs: int
    leaves: int
    gated: bool
    words: "array[int]"  # a job's arguments as far as the weight decides them
    plans: dict[tuple[int, ...], tuple["array[int]", int]]

    @property
    def num_inputs(self) -> int:
        return self.panels.shape[1]


def pack(
    weight_NK: Tensor, bias_N: Tensor | None = None, *, leaves: int = 1, gated: bool = False, consume: bool = False
) -> PackedWeight:
    """`weight_NK` in fp32 or bfloat16, contiguous; gated: gate rows, then as many up rows.

    consume: the weight is turned where it lies and means nothing afterwards, if its rows fill whole panels.
    """
    halves = 2 if gated else 1
    rows, k = weight_NK.shape
    assert rows % halves == 0 and k % leaves == 0, (rows, k, leaves, gated)
    outputs = rows // halves
    spare = -outputs % LANES
    if spare or not consume:
        apart = weight_NK.view(halves, outputs, k)
        weight_NK = F.pad(apart, (0, 0, 0, spare)) if spare else apart.clone()
    panels = turn_into_panels(weight_NK.view(-1, k))
    if bias_N is not None:
        bias_N = F.pad(bias_N.float(), (0, spare))
    half = panels.dtype == torch.bfloat16
    table = tiles(half).table
    words = array("q", bytes(8 * loops.WORDS))
    words[loops.K], words[loops.LEAVES], words[loops.PANELS] = k, leaves, len(panels)
    words[loops.W], words[loops.K_BYTES] = panels.data_ptr(), LANES * panels.element_size()
    words[loops.TABLE], words[loops.MAX_ROWS] = table.ctypes.data, len(table)
    words[loops.OUTPUTS], words[loops.EDGES] = outputs, edges().ctypes.data
    words[loops.BIAS] = 0 if bias_N is None else bias_N.data_ptr()
    return PackedWeight(panels, bias_N, outputs, leaves, gated, words, {})


def product(x_MK: Tensor, weight: PackedWeight, dtype: torch.dtype | None = None) -> Tensor:
    """x w^T + bias, [M, N], in `dtype` (that of x)."""
    out = torch.empty((len(x_MK), weight.num_outputs), dtype=dtype or x_MK.dtype)
    return _run(x_MK, weight, out, loops.FOLDED)


def gated_product(x_MK: Tensor, weight: PackedWeight) -> Tensor:
    """silu(x gate^T) * (x up^T), [M, N], in the type of x."""
    assert weight.gated and weight.leaves == 1
    return _run(x_MK, weight, torch.empty((len(x_MK), weight.num_outputs), dtype=x_MK.dtype), loops.GATED)


def leaf_sums(x_MK: Tensor, weight: PackedWeight) -> Tensor:
    """Each leaf's own sum, [L, M, N] fp32, without bias."""
    out = torch.empty((weight.leaves, len(x_MK), weight.num_outputs), dtype=torch.float32)
    return _run(x_MK, weight, out, loops.APART)


def rows_of(weight: PackedWeight, ids_T: Tensor) -> Tensor:
    """Rows of the weight as it was before it was packed, [T, K]."""
    return weight.panels[ids_T // LANES, :, ids_T % LANES]


def _run(x_MK: Tensor, weight: PackedWeight, out: Tensor, mode: int) -> Tensor:
    rows = x_MK.shape[0]
    if not out.numel():
        return out
    if x_MK.stride(-1) != 1:
        x_MK = x_MK.contiguous()
    threads = torch.get_num_threads()
    job, chunks = _planned(weight, rows, mode, threads, x_MK.dtype == torch.bfloat16, out.dtype == torch.bfloat16)
    job = job[:]
    job[loops.X], job[loops.X_STRIDE], job[loops.OUT] = x_MK.data_ptr(), x_MK.stride(0), out.data_ptr()
    address = job.buffer_info()[0]
    if job[loops.LAID_OUT]:  # rows are laid out once, not by every chunk
        room = torch.empty(rows * weight.panels.shape[1])
        job[loops.LAID_OUT] = room.data_ptr()
        loops.lay_out(address)
    companion().run(loops.multiply_job, address, chunks, threads)
    return out


def _planned(
    weight: PackedWeight, rows: int, mode: int, threads: int, x_half: bool, out_half: bool
) -> tuple["array[int]", int]:
    """(a job but for its addresses, number of chunks): the same for every step with so many rows."""
    key = rows, mode, threads, x_half, out_half, CHUNK_WORK, BLOCK_FLOATS
    known = weight.plans.get(key)
    if known is None:
        if len(weight.plans) >= MOST_PLANS:
            weight.plans.clear()
        job = weight.words[:]
        blocks, groups = _cut(job, rows, weight, threads)
        job[loops.M], job[loops.MODE] = rows, mode
        job[loops.X_HALF], job[loops.OUT_HALF], job[loops.OUT_STRIDE] = x_half, out_half, weight.num_outputs
        job[loops.LAID_OUT] = blocks == 1 and groups > 1
        known = weight.plans[key] = job, blocks * groups
    return known


def _cut(job: "array[int]", rows: int, weight: PackedWeight, threads: int) -> tuple[int, int]:
    """(blocks of rows, groups of panels); their product is the number of chunks."""
    k, tallest = weight.num_inputs, job[loops.MAX_ROWS]
    panels = len(weight.panels) // (2 if weight.gated else 1)
    most = max(tallest, BLOCK_FLOATS // max(1, k) // tallest * tallest)
    blocks = _ceil(rows, most)
    block_rows = _ceil(_ceil(rows, blocks), tallest) * tallest if blocks > 1 else rows
    blocks = _ceil(rows, block_rows)
    groups = 1
    if threads > 1:
        work = len(weight.panels) * LANES * k * (block_rows + 4)
        wanted = _ceil(CHUNKS_A_THREAD * threads, blocks)
        groups = max(1, min(work // CHUNK_WORK, wanted, panels))
        if blocks == 1 and 1 < groups < wanted:  # few chunks: as many for each thread
            groups = min(panels, _ceil(groups, threads) * threads)
    group_panels = _ceil(panels, groups)
    groups = _ceil(panels, group_panels)
    job[loops.BLOCK_ROWS], job[loops.GROUP_PANELS], job[loops.GROUPS] = block_rows, group_panels, groups
    return blocks, groups


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
