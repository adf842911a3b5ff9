"""Hopper's candidates: each could be launched, and one that hangs or dies costs only itself."""

import sys
import time
from pathlib import Path

import pytest
import torch

from worker_svc.cuda import matmul_hopper

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import hopper_candidates
from hopper_candidates import Job, candidates, passed

STUB = """
import json, sys, time
for job in json.load(sys.stdin):
    if job["tile"]["block_n"] == 32:
        time.sleep(60)
    if job["tile"]["block_n"] == 48:
        sys.exit(1)
    print("answer", job["tile"]["block_n"] != 24, flush=True)
"""


def test_a_tile_that_hangs_dies_or_is_wrong_is_dropped_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setattr(hopper_candidates, "__file__", str(tmp_path / "stub.py"))
    monkeypatch.setattr(hopper_candidates, "STALL_S", 2.0)
    jobs = {Job(tile, False, False, True, True) for tile in candidates(6144, False, False, 8, 132)}
    assert {24, 32, 48, 64} <= {job.tile.block_n for job in jobs}
    start = time.monotonic()
    assert passed(jobs, children=4, seconds=40) == {job for job in jobs if job.tile.block_n not in (24, 32, 48)}
    assert time.monotonic() - start < 40


def test_a_trial_ends_in_time_though_everything_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stub.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(hopper_candidates, "__file__", str(tmp_path / "stub.py"))
    jobs = [Job(tile, False, False, True, True) for tile in candidates(4096, False, False, 8, 132)]
    start = time.monotonic()
    assert passed(jobs, children=2, seconds=2) == set() and time.monotonic() - start < 10


@pytest.mark.parametrize("n", [1024, 4096, 6144, 24576, 151936])
@pytest.mark.parametrize("bucket", [8, 16, 64, 128, 256, 2048])
def test_every_candidate_could_be_launched(n: int, bucket: int) -> None:
    for gated in (False, True):
        tiles = candidates(n, gated, False, bucket, 132)
        assert tiles
        for tile in tiles:
            together = 1 if tile.programs == 1 else tile.programs
            assert matmul_hopper.shared_bytes(tile, torch.bfloat16, gated=gated) * together <= 228 << 10
            assert matmul_hopper.registers(tile) * 32 * (tile.warps + 4) * together <= matmul_hopper.REGISTERS
            assert tile.block_n % (16 if gated else 8) == 0 and tile.stages >= 2
