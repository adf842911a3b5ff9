"""The draw of plain rows on the device: greedy or Gumbel-max over the whole vocabulary, and the drawn token's logprob.

Knows the logits, and of each row what `step_state` holds. Rows that ask for more (penalties, bias, masks, top-k, top-p,
min-p, alternatives) are drawn by `worker_svc.sampling` from the same logits, and so is everything with sampling at the
scheduler; the tokens are the same, because both take

    argmax over ids of (z - maximum) / T + g,   g = -log(-log(u)),   u from the counter (worker_svc/sampling/philox.py)

in double precision, ties to the lower id. The first kernel scores every id in single precision, whose error is far
below MARGIN; the second scores the ids of each 1024-id block that comes within MARGIN of the best again, in double.

Log-sum-exp: fixed 1024-id blocks in fp32, folded in double by one fixed tree. A row holding NaN or +inf draws -1.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.random import philox_impl

from worker_svc.sampling.philox import TAG

BLOCK = 1024
MARGIN = tl.constexpr(1e-2)
COUNTER_TAG = tl.constexpr(TAG)


@triton.jit
def _words(block, seed_low, seed_high, index, choice, BLOCK: tl.constexpr):
    """[BLOCK] uint32, the words of ids block * BLOCK .. in order."""
    counter = (block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = counter * 0
    a, b, c, d = philox_impl(
        zero + index.to(tl.uint32, bitcast=True),
        counter,
        zero + choice.to(tl.uint32, bitcast=True),
        zero + COUNTER_TAG,
        zero + seed_low.to(tl.uint32, bitcast=True),
        zero + seed_high.to(tl.uint32, bitcast=True),
    )
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK,))


@triton.jit
def score_kernel(logits, vocabulary, count_ptr, sample_slots, sample_indices, state, state_stride,
                 best_score, block_maximum, block_sum, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
                 DEPENDENT: tl.constexpr):  # fmt: skip
    """Program (block, row): the block's best noisy score, its maximum and the sum of its exponentials."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1)
    block = tl.program_id(0)
    if row < tl.load(count_ptr):
        params = state + tl.load(sample_slots + row).to(tl.int64) * state_stride
        temperature = tl.load(params + 1).to(tl.float32, bitcast=True)
        report = tl.load(params + 2).to(tl.float32, bitcast=True)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        z = tl.load(logits + row.to(tl.int64) * vocabulary + ids, mask=ids < vocabulary, other=float("-inf"))
        broken = tl.max(((z != z) | (z == float("inf"))).to(tl.int32))
        maximum = tl.max(z)
        to = row * BLOCKS + block
        tl.store(block_maximum + to, tl.where(broken > 0, float("nan"), maximum))
        if temperature > 0.0:
            words = _words(block, tl.load(params + 3), tl.load(params + 4), tl.load(sample_indices + row),
                           tl.load(params + 5), BLOCK)  # fmt: skip
            u = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
            v = ((4294967295 - words).to(tl.float32) + 0.5) * 2.3283064365386963e-10
            exponential = tl.where(v < 0.01, v + 0.5 * v * v, -tl.log(u))
            tl.store(best_score + to, tl.max(z / temperature - tl.log(exponential)))
        if report > 0.0:
            offset = tl.where(maximum > float("-inf"), maximum, 0.0)
            tl.store(block_sum + to, tl.sum(tl.exp((z - offset) / report)))


@triton.jit
def draw_kernel(logits, vocabulary, count_ptr, sample_slots, sample_indices, state, state_stride,
                best_score, block_maximum, block_sum, out, out_stride, entry_ptr, step_ptr,
                BLOCKS: tl.constexpr, BLOCKS_UP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
                DEPENDENT: tl.constexpr):  # fmt: skip
    """Program row: its token to state[slot, 0] and to out[entry, row]; its logprob's bits to out[entry, ROWS + row].
    Program 0 advances the step counter, which nobody else reads here.
    """
    if DEPENDENT:
        gdc_wait()
    row = tl.program_id(0)
    if row == 0:
        tl.store(step_ptr, tl.load(step_ptr) + 1)
    if row < tl.load(count_ptr):
        slot = tl.load(sample_slots + row).to(tl.int64)
        params = state + slot * state_stride
        temperature = tl.load(params + 1).to(tl.float32, bitcast=True)
        report = tl.load(params + 2).to(tl.float32, bitcast=True)
        b = tl.arange(0, BLOCKS_UP)
        real = b < BLOCKS
        maxima = tl.load(block_maximum + row * BLOCKS + b, mask=real, other=float("-inf"))
        broken = tl.max((maxima != maxima).to(tl.int32))
        maximum = tl.max(tl.where(maxima == maxima, maxima, float("-inf")))
        lane = tl.arange(0, BLOCK)
        token = -1
        if (broken == 0) & (maximum > float("-inf")):
            if temperature > 0.0:
                best = tl.load(best_score + row * BLOCKS + b, mask=real, other=float("-inf"))
                near = best >= tl.max(best) - MARGIN
                winner = maximum.to(tl.float64) - float("inf")
                done = -1
                for _ in range(tl.sum(near.to(tl.int32))):
                    block = tl.min(tl.where(near & (b > done), b, BLOCKS_UP))
                    ids = block * BLOCK + lane
                    z = tl.load(
                        logits + row.to(tl.int64) * vocabulary + ids, mask=ids < vocabulary, other=float("-inf")
                    )
                    words = _words(block, tl.load(params + 3), tl.load(params + 4), tl.load(sample_indices + row),
                                   tl.load(params + 5), BLOCK)  # fmt: skip
                    v = ((4294967295 - words).to(tl.float64) + 0.5) * 2.3283064365386962890625e-10
                    score = (z.to(tl.float64) - maximum.to(tl.float64)) / temperature.to(tl.float64)
                    score -= tl.log(-tl.log(1.0 - v))
                    top = tl.max(score)
                    if top > winner:
                        winner = top
                        token = tl.min(tl.where(score == top, ids, 2147483647))
                    done = block
            else:
                block = tl.min(tl.where(maxima == maximum, b, BLOCKS_UP))
                ids = block * BLOCK + lane
                z = tl.load(logits + row.to(tl.int64) * vocabulary + ids, mask=ids < vocabulary, other=float("-inf"))
                token = tl.min(tl.where(z == maximum, ids, 2147483647))
        tl.store(state + slot * state_stride, tl.maximum(token, 0))
        to = out + tl.load(entry_ptr).to(tl.int64) * out_stride
        tl.store(to + row, token)
        if report > 0.0:
            logprob = report * 0.0
            if token >= 0:
                factor = tl.exp((maxima.to(tl.float64) - maximum.to(tl.float64)) / report.to(tl.float64))
                sums = tl.load(block_sum + row * BLOCKS + b, mask=real, other=0.0).to(tl.float64)
                total = tl.log(tl.sum(tl.where(real, sums * factor, 0.0)))
                z = tl.load(logits + row.to(tl.int64) * vocabulary + token).to(tl.float64)
                logprob = ((z - maximum.to(tl.float64)) / report.to(tl.float64) - total).to(tl.float32)
            tl.store(to + ROWS + row, logprob.to(tl.int32, bitcast=True))


class Draws:
    """Room for the block statistics of a step's sampling rows; made once a runner."""

    def __init__(self, max_rows: int, vocabulary: int, device: torch.device | str) -> None:
        self.blocks = -(-vocabulary // BLOCK)
        self.vocabulary = vocabulary
        self.best = torch.empty(max_rows, self.blocks, device=device)
        self.maxima = torch.empty(max_rows, self.blocks, device=device)
        self.sums = torch.empty(max_rows, self.blocks, device=device)


def draw(
    draws: Draws, logits: torch.Tensor, count: torch.Tensor, slots: torch.Tensor, indices: torch.Tensor,
    state: torch.Tensor, out: torch.Tensor, entry: torch.Tensor, step: torch.Tensor, max_rows: int,
    *, dependent: bool = False,
) -> None:  # fmt: skip
    """One token for each of the first `count` rows.

    Args:
        logits: [rows, V] fp32, contiguous.
        slots, indices: [rows] the row's slot and the number of its next output token.
        state: the slot state (step_state.py); column 0 takes the token.
        out: [entries, 2 * width] int32, device or pinned host memory: entry `entry` takes tokens, then the
            logprobs' bits from column `width` on (rows that asked for one).
        step: [1] int32, advanced by one.
    """
    options: dict[str, int | bool] = {"launch_pdl": True} if dependent else {}
    columns = (
        logits,
        draws.vocabulary,
        count,
        slots,
        indices,
        state,
        state.stride(0),
        draws.best,
        draws.maxima,
        draws.sums,
    )
    score_kernel[(draws.blocks, max_rows)](
        *columns, BLOCKS=draws.blocks, BLOCK=BLOCK, DEPENDENT=dependent, num_warps=4, **options
    )
    draw_kernel[(max_rows,)](
        *columns, out, out.stride(0), entry, step, BLOCKS=draws.blocks,
        BLOCKS_UP=triton.next_power_of_2(draws.blocks), BLOCK=BLOCK, ROWS=out.shape[1] // 2,
        DEPENDENT=dependent, num_warps=4, **options,
    )  # fmt: skip
