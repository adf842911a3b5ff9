"""The device draws what the sampler draws: the same ids from the same logits, and the same log probabilities."""

import numpy as np
import pytest
import torch

from protos.step import Row, RowSampling, int32s
from worker_svc.cuda.sampler import Draws, draw
from worker_svc.cuda.step_state import slot_parameters
from worker_svc.sampling import SamplerRow, sample

VOCABULARY = 3000
CASES = [
    RowSampling(temperature=1.0),
    RowSampling(temperature=0.6, logprobs=0),
    RowSampling(temperature=0.0, logprobs=0),
    RowSampling(temperature=1.7, logprobs=0, raw_logprobs=True),
    RowSampling(temperature=0.0),
]


def run(logits: torch.Tensor, rows: list[Row], device: str) -> tuple[list[int], list[float], torch.Tensor]:
    """Tokens, logprobs and the slots' last tokens; the row in slot s draws from logits[s]."""
    state = torch.zeros(len(rows), 16, dtype=torch.int32)
    for row in rows:
        state[row.slot, : len(slot_parameters(row))] = torch.from_numpy(slot_parameters(row))
    state = state.to(device)
    draws = Draws(len(rows), logits.shape[1], device)
    slots = torch.arange(len(rows), dtype=torch.int32, device=device)
    indices = torch.tensor([len(r.token_ids) - r.num_prompt for r in rows], dtype=torch.int32, device=device)
    count = torch.tensor([len(rows)], dtype=torch.int32, device=device)
    out = torch.full((2, 2 * len(rows)), -7, dtype=torch.int32, device=device)
    step = torch.ones(1, dtype=torch.int32, device=device)
    draw(draws, logits.to(device), count, slots, indices, state, out, torch.ones_like(step), step, len(rows))
    assert int(step) == 2 and (out[0] == -7).all()
    tokens, bits = out[1, : len(rows)].cpu(), out[1, len(rows) :].cpu()
    return tokens.tolist(), bits.view(torch.float32).tolist(), state[:, 0].cpu()


def rows_of(count: int) -> list[Row]:
    return [
        Row(slot=r, name="", token_ids=int32s(*range(3 + r)), num_prompt=2, num_computed=0, block_ids=int32s(0),
            seed=(r * 0x9E3779B97F4A7C15) % 2**64, choice=r % 3, sampling=CASES[r % len(CASES)])
        for r in range(count)
    ]  # fmt: skip


def test_tokens_and_logprobs_are_the_samplers(device: str) -> None:
    rows = rows_of(20)
    logits = 3 * torch.randn(20, VOCABULARY, generator=torch.Generator().manual_seed(1))
    want = sample(logits, [SamplerRow(row) for row in rows])
    tokens, logprobs, last = run(logits, rows, device)
    assert tokens == want.token_ids.tolist() == last.tolist()
    asked = [r for r, row in enumerate(rows) if row.sampling.logprobs is not None]
    np.testing.assert_allclose([logprobs[r] for r in asked], want.logprobs[asked], atol=2e-6)
    assert len(set(tokens)) > 10


def test_ties_go_to_the_lower_id_and_broken_rows_draw_nothing(device: str) -> None:
    rows = [row for row in rows_of(15) if row.sampling.temperature == 0][:5]
    rows = [Row(slot=s, name="", token_ids=r.token_ids, num_prompt=r.num_prompt, num_computed=0, block_ids=r.block_ids,
                seed=1, sampling=r.sampling) for s, r in enumerate(rows)]  # fmt: skip
    logits = torch.zeros(len(rows), VOCABULARY)
    logits[0, [2500, 1500]] = 5.0
    logits[1, 2000] = float("nan")
    logits[2, 7] = float("inf")
    logits[3] = float("-inf")
    tokens, _, last = run(logits, rows, device)
    assert tokens == [1500, -1, -1, -1, 0]
    assert last.tolist() == [1500, 0, 0, 0, 0]


@pytest.mark.parametrize("change", ["seed", "choice", "index"])
def test_every_part_of_the_counter_matters(change: str, device: str) -> None:
    def one(**over: int) -> int:
        row = Row(slot=0, name="", token_ids=int32s(*range(3 + over.get("index", 0))), num_prompt=2, num_computed=0,
                  block_ids=int32s(0), seed=over.get("seed", 5), choice=over.get("choice", 0))  # fmt: skip
        return run(torch.zeros(1, VOCABULARY), [row], device)[0][0]

    assert one() != one(**{change: 9})
