"""Attention over the paged cache is right in decode, prefill and chunks of it, and does not see what it must not."""

import pytest
import torch

from tests.cuda.paged import Paged
from worker_svc.cuda import decode_hopper, prefill_hopper
from worker_svc.cuda.attention import Shape, Tuning

SHAPES = [Shape(4, 2, 32, 64), Shape(4, 1, 32, 16), Shape(2, 2, 32, 64, window=100), Shape(6, 2, 32, 64)]
TUNING = Tuning(prefill_block_m=32)
SPANS = [
    ([(0, 0, 1), (1, 299, 1), (2, 256, 1)], "decode"),
    ([(1, 0, 300)], "prefill"),
    ([(2, 250, 11), (0, 4, 1), (1, 290, 10)], "chunks beside a decode row"),
]


def close(out: torch.Tensor, want: torch.Tensor) -> bool:
    return float((out.double() - want).norm() / want.norm()) < (1e-2 if out.dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("spans", [s for s, _ in SPANS], ids=[name for _, name in SPANS])
@pytest.mark.parametrize("shape", SHAPES, ids=["pages", "small pages", "window", "three heads a kv head"])
def test_attention_is_right(shape: Shape, spans: list[tuple[int, int, int]], device: str, dtype: torch.dtype) -> None:
    paged = Paged(shape, [5, 300, 261], device, dtype)
    assert close(paged.run(spans, TUNING), paged.reference(spans))


def test_nan_in_keys_and_values_past_the_row_is_not_seen(device: str, dtype: torch.dtype) -> None:
    paged = Paged(SHAPES[0], [70], device, dtype)
    spans = [(0, 69, 1)]
    paged.k[paged.tables[0, 1], :, 6:] = float("nan")
    paged.v[paged.tables[0, 1], :, 6:] = float("nan")
    assert close(paged.run(spans, TUNING), paged.reference(spans))
    assert close(paged.run([(0, 60, 10)], TUNING), paged.reference([(0, 60, 10)]))


def test_a_key_of_the_future_would_be_seen_by_this_oracle(device: str, dtype: torch.dtype) -> None:
    paged = Paged(SHAPES[0], [70], device, dtype)
    out = paged.run([(0, 60, 1)], TUNING)
    assert not close(paged.run([(0, 61, 1)], TUNING), out.double())


def test_how_splits_are_loaded_for_folding_changes_no_bit(device: str, dtype: torch.dtype) -> None:
    paged = Paged(Shape(2, 1, 32, 64), [3000, 300], device, dtype)
    spans = [(0, 2999, 1), (1, 299, 1)]
    one_by_one = paged.run(spans, Tuning(fold_ahead=1, fold_rows=0))
    for tuning in (Tuning(fold_ahead=8, fold_width=16), Tuning(fold_ahead=16, fold_rows=0)):
        assert torch.equal(paged.run(spans, tuning), one_by_one)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("heads", [8, 32])
def test_prefill_on_hopper_has_the_bits_of_the_plain_kernel(heads: int, block_size: int) -> None:
    shape = Shape(heads, 8, 128, block_size)
    if not prefill_hopper.fits(shape):
        pytest.skip("needs a Hopper GPU and its Triton")
    paged = Paged(shape, [700, 513, 64, 1100], "cuda", torch.bfloat16)
    for spans in [[(s, 0, n) for s, n in enumerate(paged.lengths)], [(0, 100, 333), (1, 255, 2), (3, 511, 300)]]:
        plain = paged.run(spans, Tuning(hopper_prefill=False))
        assert torch.equal(paged.run(spans, Tuning(hopper_prefill=True)), plain)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("heads, width, window", [(32, 128, 0), (16, 128, 300), (8, 64, 0), (96, 128, 0)])
def test_decode_on_hopper_has_the_bits_of_the_plain_kernel(
    heads: int, width: int, window: int, block_size: int
) -> None:
    shape = Shape(heads, 8, width, block_size, window)
    if not decode_hopper.fits(shape):
        pytest.skip("needs a Hopper GPU and its Triton")
    lengths = [1, 63, 64, 65, 255, 256, 257, 3000, *(1 + 389 * i % 901 for i in range(40))]
    paged = Paged(shape, lengths, "cuda", torch.bfloat16)
    for back in (0, 1, 70):
        spans = [(s, n - 1 - min(n - 1, back), 1) for s, n in enumerate(lengths)]
        plain = paged.run(spans, Tuning(hopper_decode_rows=0))
        for programs, stages in ((2, 6), (1, 13), (3, 4)):
            tuning = Tuning(hopper_decode_rows=1 << 20, hopper_decode_programs=programs, hopper_decode_stages=stages)
            assert torch.equal(paged.run(spans, tuning), plain)
