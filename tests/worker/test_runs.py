"""Strided bytes of a file: many a call, gaps wide and narrow, files that end too early, against slices of bytes."""

import os
from pathlib import Path

import pytest

from worker_svc.loading import runs
from worker_svc.loading.runs import Runs

# Offset, count, stride, repeats.
SHAPES = {
    "one": (5, 3000, 0, 1),
    "no gap": (1, 10, 10, 40),
    "one call": (3, 7, 19, runs.TOGETHER),
    "one more": (3, 7, 19, runs.TOGETHER + 1),
    "many calls": (0, 1, 3, 5 * runs.TOGETHER + 17),
    "widest gap": (11, 5, 5 + runs.GAP_BYTES, 20),
    "too wide": (11, 5, 6 + runs.GAP_BYTES, 20),
}


def expected(data: bytes, shape: Runs) -> bytes:
    starts = (shape.offset + run * shape.stride for run in range(shape.repeats))
    return b"".join(data[start : start + shape.count] for start in starts)


@pytest.fixture(params=(True, False), ids=("compiled", "plain"), autouse=True)
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(runs, "_compiled", lambda: None)
    return bool(request.param)


@pytest.mark.parametrize("name", SHAPES)
def test_every_byte_lands_where_it_belongs(name: str, compiled: bool, tmp_path: Path) -> None:
    shape = Runs(*SHAPES[name])
    end = shape.offset + (shape.repeats - 1) * shape.stride + shape.count
    data = os.urandom(end)  # the last run ends with the file
    (tmp_path / "file").write_bytes(data)
    room = bytearray(shape.size + 64)  # what lies behind stays as it is
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        runs.read(descriptor, shape, memoryview(room)[: shape.size])
        assert room[: shape.size] == expected(data, shape)
        assert room[shape.size :] == bytes(64)
        if compiled:
            loop = runs._compiled()
            assert loop is not None and loop(descriptor, shape, memoryview(room)[: shape.size]) == shape.repeats
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_that_ends_in_any_part_of_a_run_or_gap_is_noticed(name: str, compiled: bool, tmp_path: Path) -> None:
    shape = Runs(*SHAPES[name])
    last = shape.offset + (shape.repeats - 1) * shape.stride
    middle = shape.offset + shape.repeats // 2 * shape.stride
    for size in {0, shape.offset, middle, middle + 1, max(0, last - 1), last, last + shape.count - 1}:
        data = os.urandom(size)
        (tmp_path / "file").write_bytes(data)
        descriptor, room = os.open(tmp_path / "file", os.O_RDONLY), bytearray(shape.size)
        try:
            with pytest.raises(runs.Ended):
                runs.read(descriptor, shape, memoryview(room))
            whole = sum(shape.offset + run * shape.stride + shape.count <= size for run in range(shape.repeats))
            if compiled:
                loop = runs._compiled()
                assert loop is not None and loop(descriptor, shape, memoryview(room)) == whole
            assert room[: whole * shape.count] == expected(data, shape)[: whole * shape.count]
        finally:
            os.close(descriptor)


@pytest.mark.parametrize("most", (1, 4, 64, 1000))
def test_pieces_are_the_same_bytes_in_the_same_order(most: int) -> None:
    shape, data = Runs(3, 10, 25, 30), os.urandom(1000)
    pieces = list(shape.pieces(most))
    assert b"".join(expected(data, piece) for piece in pieces) == expected(data, shape)
    assert max(piece.size for piece in pieces) <= most
