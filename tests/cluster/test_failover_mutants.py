"""The comparison after a failover notices a recovery that is not quite one: processes broken on purpose."""

import os
import signal

import pytest

from bench.traffic import Crowd, mixed_requests
from tests.cluster import Cluster

pytestmark = [pytest.mark.services, pytest.mark.slow]
REQUESTS = mixed_requests(11, count=6)

# Loaded by every process of the cluster before anything else; PATCH runs when the module it names is imported.
SITE = """
import importlib.abc, importlib.util, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != {module!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            patch(module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())

{patch}
"""
ANOTHER_SEED = """
def patch(codec):
    from dataclasses import replace
    real = codec.encode_request
    def encode_request(batch):
        if batch.epoch > {after}:
            batch = replace(batch, rows=tuple(replace(row, seed=row.seed ^ 1) for row in batch.rows))
        return real(batch)
    codec.encode_request = encode_request
"""


def broken(folder, module, patch):
    (folder / "sitecustomize.py").write_text(SITE.format(module=module, patch=patch))
    return {"PYTHONPATH": str(folder)}


def disturbed(cluster):
    crowd = Crowd(cluster.address, REQUESTS)
    crowd.wait_for_tokens(20)
    os.kill(cluster.worker_pid(0), signal.SIGKILL)
    return crowd.join()


@pytest.mark.parametrize("after, survives", [(1, False), (1 << 40, True)], ids=["mutant", "control"])
def test_rows_that_come_back_with_another_seed_are_noticed(tiny, tmp_path, after, survives):
    environment = broken(tmp_path, "protos.codec", ANOTHER_SEED.format(after=after))
    with Cluster(tiny, environment=environment) as cluster:
        expected = Crowd(cluster.address, REQUESTS).join()
        assert (disturbed(cluster) == expected) is survives
