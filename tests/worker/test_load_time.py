"""The bench of loading runs, and says what each rank read and took."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_bench_of_loading_says_what_ranks_read_and_took(tiny: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "load.json"
    command = [sys.executable, str(ROOT / "bench" / "load_time.py"), "--config", str(tiny("qwen3") / "config.json")]
    subprocess.run([*command, "--layers", "2", "--rounds", "1", "--threads", "2", "--json", str(out)], check=True)
    result = json.loads(out.read_text())
    assert [(f["kind"], f["ranks"]) for f in result["figures"]] == [
        (kind, ranks) for ranks in (1, 2) for kind in ("read", "keep", "load", "pack")
    ]
    for figure in result["figures"]:
        assert figure["seconds"] > 0 and figure["spare_mib"] < 64, figure
