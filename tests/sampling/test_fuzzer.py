"""A short run of the invariance fuzzer over the real services, and a service that is broken on purpose."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# In every process of the cluster, once what draws is imported: the noise is keyed by the row's place.
BROKEN_WORKER = """
import importlib.abc, importlib.util, sys

class Break(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "worker_svc.drawing":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            draw = module.sample

            def sample(logits, rows):
                for place, row in enumerate(rows):
                    row.choice = place
                return draw(logits, rows)

            module.sample = sample

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Break())
"""


def fuzz(*arguments, cwd, **environment):
    return subprocess.run(
        [sys.executable, str(ROOT / "bench" / "invariance.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | environment,
        timeout=280,
    )


def figures(run):
    """The last line as numbers: positions, differing, axes tried, axes."""
    last = run.stdout.strip().splitlines()[-1]
    values = dict(item.split("=") for item in last.split())
    tried, axes = values["axes"].split("/")
    return int(values["positions"]), int(values["differing"]), int(tried), int(axes)


@pytest.mark.timeout(300)
def test_crowds_on_any_deployment_are_told_what_each_request_is_told_alone(tmp_path):
    run = fuzz("--seconds", 10, "--seed", 11, cwd=tmp_path)
    positions, differing, tried, axes = figures(run)
    assert differing == 0 and positions >= 1000, run.stdout + run.stderr
    assert tried == axes and axes >= 12, run.stdout
    assert run.returncode == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_broken_worker_is_found_out_and_the_reproducer_shows_it_again(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text(BROKEN_WORKER)
    broken = {"PYTHONPATH": str(tmp_path / "broken")}
    out = tmp_path / "found.json"
    run = fuzz("--seconds", 10, "--seed", 11, "--out", out, cwd=tmp_path, **broken)
    assert run.returncode == 1 and figures(run)[1] > 0, run.stdout + run.stderr
    case = json.loads(out.read_text())
    assert case["suspect"] in [one["request"]["requestId"] for one in case["arrivals"]]
    assert len(case["arrivals"]) <= 12
    assert fuzz("--replay", out, cwd=tmp_path, **broken).returncode == 1
    assert fuzz("--replay", out, cwd=tmp_path).returncode == 0
