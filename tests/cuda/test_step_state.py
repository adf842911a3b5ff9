"""A step's message arrives whole: whatever the bounds, every column is where kernels read it."""

import numpy as np
import pytest
import torch

from protos.step import Row, StepBatch, int32s
from worker_svc.cuda.sharing import Sharing
from worker_svc.cuda.step_state import PARAMETERS, Pairs, Sizes, StepState
from worker_svc.slots import SlotTable

BLOCK = 16


def row(slot: int, tokens: int, prompt: int) -> Row:
    ids = np.arange(tokens, dtype=np.int32) + 100 * slot
    blocks = np.arange(4, dtype=np.int32) + 4 * slot
    return Row(slot, "", ids, prompt, 0, blocks, seed=2**63 + slot, choice=slot % 2)


@pytest.mark.parametrize("max_rows", [5, 64, 256])
def test_every_column_arrives(max_rows: int, device: str) -> None:
    sizes = Sizes(rows=max_rows, tokens=512, tiles=64 + max_rows, blocks=8)
    state = StepState(sizes, device)
    pairs = Pairs(sizes, Sharing(max_rows, sizes.max_items, BLOCK))
    table = SlotTable(max_rows, 8)
    count = min(max_rows, 40)
    rows = tuple(row(slot, 1 + slot % 5, 1) for slot in range(count))
    new = int32s(*(len(r.token_ids) for r in rows))
    for introduced in rows:
        pairs.introduce(introduced)
    plan = table.apply(StepBatch(1, 0, rows=rows, slots=int32s(*range(count)), num_new=new))
    state.write(plan, pairs, tile_tokens=2)
    state.unpack()
    assert [int(n) for n in (state.num_tokens, state.num_rows, state.num_samples)] == [new.sum(), count, count]
    np.testing.assert_array_equal(state.row_slots[:count].cpu(), plan.slots)
    np.testing.assert_array_equal(state.first_positions[:count].cpu(), plan.first_position)
    np.testing.assert_array_equal(state.query_starts[: count + 1].cpu(), plan.query_starts)
    np.testing.assert_array_equal(state.decode_lengths[:count].cpu(), np.where(new == 1, 1, 0))
    np.testing.assert_array_equal(state.sample_tokens[:count].cpu(), plan.query_starts[1:] - 1)
    np.testing.assert_array_equal(state.sample_slots[:count].cpu(), plan.slots)
    np.testing.assert_array_equal(state.sample_indices[:count].cpu(), new - 1)
    np.testing.assert_array_equal(state.token_ids[: new.sum()].cpu(), plan.token_ids)
    np.testing.assert_array_equal(state.token_slots[: new.sum()].cpu(), np.repeat(plan.slots, new))
    np.testing.assert_array_equal(state.positions[: new.sum()].cpu(), np.concatenate([np.arange(n) for n in new]))
    tiles = [(r, t) for r, n in enumerate(new.tolist()) if n > 1 for t in range(0, n, 2)]
    listed = zip(state.tile_rows.tolist(), state.tile_tokens.tolist())
    assert int(state.num_tiles) == len(tiles) and sorted(list(listed)[: len(tiles)]) == tiles
    np.testing.assert_array_equal(state.tables[count - 1, :4].cpu(), rows[-1].block_ids)


def test_a_token_that_only_the_device_knows_is_the_slots_last(device: str) -> None:
    sizes = Sizes(rows=4, tokens=16, tiles=8, blocks=8)
    state, table = StepState(sizes, device), SlotTable(4, 8)
    pairs = Pairs(sizes, Sharing(4, sizes.max_items, BLOCK))
    one = row(2, 3, 3)
    pairs.introduce(one)
    plan = table.apply(StepBatch(1, 0, rows=(one,), slots=int32s(2), num_new=int32s(3)))
    state.write(plan, pairs, tile_tokens=2)
    state.unpack()
    table.drawn(plan, int32s(-1))
    state.state[2, 0] = 77  # what the draw leaves
    state.step += 1
    pairs.extend([2], [1], int32s(9))
    state.write(table.apply(StepBatch(1, 1)), pairs, tile_tokens=2)
    state.unpack()
    assert int(state.token_ids[0]) == 77 and int(state.positions[0]) == 3 and int(state.decode_lengths[0]) == 4
    assert int(state.sample_indices[0]) == 1 and int(state.tables[2, 4]) == 9


def test_the_latest_of_two_introductions_of_a_slot_counts(device: str) -> None:
    sizes = Sizes(rows=4, tokens=16, tiles=8, blocks=8)
    pairs = Pairs(sizes, Sharing(4, sizes.max_items, BLOCK))
    pairs.introduce(row(1, 3, 3))
    pairs.introduce(row(1, 5, 4))
    flat = pairs.take().reshape(-1, 2)
    assert len(np.unique(flat[:, 0])) == len(flat)
    at = dict(flat.tolist())
    assert at[(PARAMETERS + 8) + 6] == 4 and not len(pairs.take())


def test_columns_of_unequal_width_would_be_seen(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Sizes.columns.fget
    assert whole is not None

    def shifted(sizes: Sizes) -> dict[str, tuple[int, int]]:
        columns = dict(whole(sizes))
        offset, length = columns["decode_lengths"]
        columns["decode_lengths"] = (offset + 32, length - 32)
        return columns

    monkeypatch.setattr(Sizes, "columns", property(shifted))
    with pytest.raises(AssertionError):
        test_every_column_arrives(256, device)
    assert torch.is_tensor(StepState(Sizes(64, 16, 8, 8), device).decode_lengths)
