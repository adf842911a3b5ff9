"""Rows that share splits read them once and get the bits that each would get alone; groups follow the slots."""

import numpy as np
import pytest
import torch

from protos.step import Row, int32s
from tests.cuda.paged import Paged
from worker_svc.cuda.attention import RECORD, SPLITS, Shape, Tuning
from worker_svc.cuda.sharing import Sharing

TUNING = Tuning(prefill_block_m=32)


@pytest.mark.parametrize("shape", [Shape(4, 2, 32, 64), Shape(4, 1, 32, 16)], ids=["pages", "small pages"])
def test_a_shared_split_gives_the_attention_of_an_own_one(shape: Shape, device: str, dtype: torch.dtype) -> None:
    paged = Paged(shape, [600, 530, 300, 560], device, dtype)
    paged.share([1, 0, 3], 2)
    spans = [(0, 599, 1), (2, 299, 1), (3, 512, 1), (1, 529, 1)]
    together = paged.run(spans, TUNING, shared=True)
    want = paged.reference(spans)
    assert float((together.double() - want).norm() / want.norm()) < (1e-2 if dtype == torch.bfloat16 else 1e-5)
    alone = paged.run(spans, TUNING)
    torch.testing.assert_close(together, alone, rtol=0, atol=0 if device == "cuda" else 1e-5)


def test_a_member_that_does_not_decode_in_this_step_is_left_out(device: str, dtype: torch.dtype) -> None:
    paged = Paged(Shape(4, 2, 32, 64), [600, 530, 560], device, dtype)
    paged.share([0, 1, 2], 2)
    spans = [(0, 599, 1), (2, 540, 20)]
    out, want = paged.run(spans, TUNING, shared=True), paged.reference(spans)
    assert float((out.double() - want).norm() / want.norm()) < (1e-2 if dtype == torch.bfloat16 else 1e-5)


def row(slot: int, blocks: list[int], tokens: int = 600) -> Row:
    return Row(slot, "", np.zeros(tokens, np.int32), tokens, 0, int32s(*blocks), 0)


def members(sharing: Sharing) -> list[list[int]]:
    """The groups as (splits, slots..)."""
    _, records, items = sharing.table()
    assert len(items) == records[:, 1].sum() if len(records) else not len(items)
    assert sorted(items.tolist()) == sorted(int(n) * SPLITS + s for n, k in records[:, :2] for s in range(k))
    assert records.shape[1] == 1 + RECORD
    return [[int(record[1]), *(int(slot) for slot in record[2:] if slot >= 0)] for record in records]


def test_rows_with_equal_leading_blocks_form_a_group_until_one_is_left() -> None:
    sharing = Sharing(8, 64, 128)
    sharing.introduce(row(0, [5, 6, 7, 8, 9]))
    assert members(sharing) == []
    sharing.introduce(row(3, [5, 6, 7, 8, 1]))
    sharing.introduce(row(4, [5, 6, 2, 3, 4]))  # only one split in common: no company
    sharing.introduce(row(5, [5, 6, 7, 8, 2]))
    assert members(sharing) == [[2, 0, 3, 5]]
    assert sharing.table()[0] == {0: 2, 3: 2, 5: 2}
    sharing.retire(0)
    assert members(sharing) == [[2, 3, 5]]
    sharing.retire(5)
    assert members(sharing) == []
    sharing.introduce(row(0, [5, 6, 7, 8, 3]))
    assert len(members(sharing)) == 1


def test_a_split_that_is_not_known_to_its_end_is_not_shared() -> None:
    sharing = Sharing(8, 64, 128)
    for slot in range(2):
        sharing.introduce(row(slot, [5, 6, 7, 8], tokens=300))
    assert members(sharing) == [[1, 0, 1]]
