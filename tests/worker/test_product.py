"""Our own product is one expression: its plain twin's bits for every number of rows, shard, thread and tile."""

import os
import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from worker_svc.ops import invariance, packing, plain_product, product, product_loops, tiles
from worker_svc.ops.companion import companion
from worker_svc.ops.matmul import MatmulPath, prepare

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((40, 20, 1), (24, 33, 3), (7, 16, 1), (48, 64, 8), (5, 1, 1), (96, 160, 6), (576, 96, 3))  # K, N, leaves


def drawn(rows: int, columns: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and invariance.same_bits(a, b)


def twin(x: Tensor, w: Tensor, bias: Tensor | None = None, leaves: int = 1) -> Tensor:
    given = None if bias is None else bias.float().numpy()
    return torch.from_numpy(plain_product.product(x.float().numpy(), w.float().numpy(), given, leaves))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n", "leaves"), SHAPES)
def test_every_number_of_rows_has_the_bits_of_the_plain_twin(k: int, n: int, leaves: int, dtype: torch.dtype) -> None:
    x, w, bias = drawn(70, k, dtype), drawn(n, k, dtype, 2), drawn(1, n, dtype, 3)[0]
    expected = twin(x, w, bias, leaves)
    packed = product.pack(w, bias, leaves=leaves)
    for rows in (*range(1, 20), 33, 70):
        assert same(product.product(x[:rows], packed), expected[:rows].to(dtype)), rows
        assert same(product.product(x[70 - rows :], packed, torch.float32), expected[70 - rows :]), rows
    apart = plain_product.leaf_sums(x.float().numpy(), w.float().numpy(), leaves)
    assert same(product.leaf_sums(x, product.pack(w, leaves=leaves)), torch.from_numpy(np.stack(apart)))


def test_the_twins_fma_rounds_once() -> None:
    """Halfway cases that two roundings get wrong, and subnormal results."""
    one = np.float32(1)
    x, y = one + np.float32(2**-12), one - np.float32(2**-12)  # 1 - 2^-24, halfway between two floats with z = 1
    below = np.float32(2**-60)
    z = np.array([1.0, -1.0, 2.0**-30], np.float32)
    got = plain_product.fma(np.full(3, x), np.full(3, y), z)
    exact = [float(x) * float(y) + float(v) for v in z]
    assert got.tolist() == [np.float32(v) for v in exact]
    nearly = plain_product.fma(
        np.array([1.0], np.float32), np.array([1.0 + 2**-23], np.float32), np.array([2**-24], np.float32)
    )
    assert nearly[0] == np.float32(1 + 2**-22)  # a tie goes to the even neighbour
    third = plain_product.fma(np.array([below]), np.array([below]), np.array([1 + 2**-23], np.float32))
    assert third[0] == np.float32(1 + 2**-23)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shard_of_the_columns_and_a_part_of_the_leaves_have_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    x, w = drawn(9, 96, dtype), drawn(100, 96, dtype, 2)
    whole = product.product(x, product.pack(w))
    for begin, end in ((0, 50), (50, 100), (3, 4), (17, 40), (5, 5)):
        assert same(product.product(x, product.pack(w[begin:end])), whole[:, begin:end].contiguous())
    sums = product.leaf_sums(x, product.pack(w, leaves=6))
    for first, count in ((0, 2), (2, 4), (5, 1)):
        columns = slice(first * 16, (first + count) * 16)
        part = product.pack(w[:, columns].contiguous(), leaves=count)
        assert same(product.leaf_sums(x[:, columns], part), sums[first : first + count].contiguous())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ((tiles.NEON), (tiles.AVX2), (tiles.AVX512)), ids=("width 4", "width 8", "width 16"))
def test_the_shape_of_a_tile_changes_no_bit(
    shape: tiles.Tiling, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vector widths of other processors, in this one's registers."""
    monkeypatch.setattr(tiles, "best_tiling", lambda: shape)
    monkeypatch.setattr(product, "tiles", tiles.tiles.__wrapped__)
    x, w = drawn(40, 48, dtype), drawn(112, 48, dtype, 2)
    expected, packed, gated = twin(x, w, leaves=3).to(dtype), product.pack(w, leaves=3), product.pack(w, gated=True)
    made = [packed, gated]
    usual = None
    for rows in range(1, 41):
        assert same(product.product(x[:rows], made[0]), expected[:rows]), rows
        usual = product.gated_product(x, made[1]) if usual is None else usual
        assert same(product.gated_product(x[:rows], made[1]), usual[:rows]), rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_is_silu_of_gate_times_up(dtype: torch.dtype) -> None:
    for k, outputs in ((32, 48), (20, 7), (16, 16)):
        x, w = drawn(30, k, dtype), drawn(2 * outputs, k, dtype, 2)
        gate, up = twin(x, w).double().chunk(2, 1)
        expected = gate * torch.sigmoid(gate) * up
        got = product.gated_product(x, product.pack(w, gated=True))
        assert torch.allclose(got.double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_cuts_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = drawn(150, 320, dtype), drawn(650, 320, dtype, 2)
    packed, threads = product.pack(w, leaves=4), torch.get_num_threads()
    torch.set_num_threads(1)
    expected = product.product(x, packed)
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            for work, held in ((1, 1 << 10), (20_000, 1 << 13), (10**9, 1 << 20)):
                monkeypatch.setattr(product, "CHUNK_WORK", work)
                monkeypatch.setattr(product, "BLOCK_FLOATS", held)
                assert same(product.product(x, packed), expected), (count, work, held)
    finally:
        torch.set_num_threads(threads)


def test_rows_may_be_a_view_and_values_may_be_anything() -> None:
    x, w = drawn(6, 64, torch.float32), drawn(32, 32, torch.float32, 2)
    packed = product.pack(w)
    assert same(product.product(x[:, 32:], packed), product.product(x[:, 32:].contiguous(), packed))
    assert same(product.product(x.t()[:, :].contiguous().t()[:, :32], packed), product.product(x[:, :32], packed))
    x[2, 3], x[4, 5] = float("nan"), float("inf")
    got = product.product(x[:, :32], packed)
    assert got[2].isnan().all() and not got[4].isfinite().any() and got[[0, 1, 3, 5]].isfinite().all()
    half = product.product(x[:, :32].bfloat16(), product.pack(w.bfloat16()))
    assert half[2].isnan().all() and half[[0, 1, 3, 5]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", (48, 50))
def test_a_packed_table_still_has_its_rows(outputs: int, dtype: torch.dtype) -> None:
    w = drawn(outputs, 24, dtype)
    kept = w.clone()
    packed = product.pack(w, consume=True)
    assert (packed.panels.data_ptr() == w.data_ptr()) == (outputs % 16 == 0)  # whole panels are turned where they lie
    assert same(product.rows_of(packed, torch.arange(outputs)), kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", (0, 1, 31, 32, 50, 97, 576))
def test_rows_are_turned_into_panels(k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "CHUNK_ITEMS", 2000)
    rows, threads = drawn(16 * 11, k, dtype), torch.get_num_threads()
    expected = rows.view(11, 16, k).transpose(1, 2).contiguous()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert same(packing.turn_into_panels(rows.clone()), expected)
    finally:
        torch.set_num_threads(threads)


def test_callers_at_once_are_safe() -> None:
    """Two engines in a process: the second one works alone, and a helper is never of use to both."""
    x, w = drawn(40, 512, torch.float32), drawn(512, 512, torch.float32, 2)
    packed = product.pack(w)
    expected, wrong = product.product(x, packed), []

    def often() -> None:
        torch.set_num_threads(2)
        wrong.extend(i for i in range(60) if not same(product.product(x, packed), expected))

    callers = [threading.Thread(target=often) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not any(caller.is_alive() for caller in callers) and not wrong


def test_helpers_sleep_when_there_is_nothing_to_do() -> None:
    import time

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    product.product(drawn(40, 512, torch.float32), product.pack(drawn(512, 512, torch.float32)))
    torch.set_num_threads(threads)
    time.sleep(0.05)
    used = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.1


def test_a_forked_child_has_helpers_of_its_own() -> None:
    mine = companion()
    child = os.fork()
    if child == 0:
        os._exit(0 if companion() is not mine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_product_in_another_order_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: leaves of one row are summed in one piece."""
    honest = product._run

    def broken(x: Tensor, weight: product.PackedWeight, out: Tensor, mode: int) -> Tensor:
        if len(x) > 1 or mode != product_loops.FOLDED:
            return honest(x, weight, out, mode)
        words = weight.words[:]
        words[product_loops.LEAVES] = 1
        whole = product.PackedWeight(weight.panels, weight.bias, weight.num_outputs, 1, False, words, {})
        return honest(x, whole, out, mode)

    x, w = drawn(5, 96, torch.float32), drawn(64, 96, torch.float32, 2)
    packed = product.pack(w, leaves=3)
    whole = product.product(x, packed)
    assert same(product.product(x[:1], packed), whole[:1])
    monkeypatch.setattr(product, "_run", broken)
    assert not same(product.product(x[:1], packed), whole[:1])


def test_the_self_test_takes_it_where_no_matrix_unit_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "_library_is_faster", lambda dtype: False)
    assert next(invariance._candidates(torch.bfloat16)) == MatmulPath("fma")
    assert str(MatmulPath("fma")) == "fma"
    assert invariance.matmul_is_invariant(torch.float32, MatmulPath("fma"))
    assert prepare(drawn(8, 4, torch.float32), None, MatmulPath("fma")).packed is not None
    monkeypatch.setattr(invariance, "_library_is_faster", lambda dtype: True)
    assert MatmulPath("fma") in tuple(invariance._candidates(torch.bfloat16))
