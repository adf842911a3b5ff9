"""The dashboard's queries have answers: a real Prometheus scrapes a real scheduler and runs every one of them."""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client import Lockstep
from tests.cluster import Cluster
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.services
DOCKER = Path(__file__).parents[2] / "docker"
DASHBOARD = json.loads((DOCKER / "grafana/dashboards/lockstep.json").read_text())
QUERIES = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]
# These need an event that a calm run does not have, or a label value that has not occurred.
MAY_BE_EMPTY = {"Refused and failed, by code"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as reply:
        text: str = reply.read().decode()
        return text


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of the endpoint of a scheduler that has just answered some requests."""
    port = free_port()
    model = make_tiny(tmp_path_factory.mktemp("tiny"))
    with Cluster(model, metrics=f"127.0.0.1:{port}") as cluster:
        with Lockstep(cluster.address) as client:
            for _ in range(2):
                client.batch([[1, 2, 3, length] * 8 for length in range(8)], max_tokens=16, ignore_eos=True)
        yield port


def test_every_metric_of_the_dashboard_exists(metrics: int) -> None:
    exposed = set(re.findall(r"^(lockstep_\w+)[{ ]", fetch(f"http://127.0.0.1:{metrics}/metrics"), re.M))
    asked = {name for _, query in QUERIES for name in re.findall(r"lockstep_\w+", query)}
    optional = {"lockstep_requests_refused_total", "lockstep_requests_failed_total"}
    assert len(asked) > 15
    assert asked - exposed - optional == set()
    assert {"lockstep_no_such_total"} - exposed  # the check can fail


@pytest.mark.skipif(not shutil.which("prometheus"), reason="needs Debian's package prometheus")
def test_prometheus_answers_every_query(metrics: int, tmp_path: Path) -> None:
    config = (DOCKER / "prometheus.yml").read_text()
    assert subprocess.run(["promtool", "check", "config", str(DOCKER / "prometheus.yml")]).returncode == 0
    config = config.replace("scheduler:9464", f"127.0.0.1:{metrics}").replace("5s", "1s")
    (tmp_path / "prometheus.yml").write_text(config)
    port = free_port()
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    server = subprocess.Popen(
        [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        assert until(lambda: ask(port, "count_over_time(lockstep_steps_total[1m]) >= 4"), 40)
        empty = set()
        for title, query in QUERIES:
            concrete = query.replace("$__rate_interval", "1m").replace("$model", ".*")
            if not ask(port, concrete):
                empty.add(title)
        assert empty <= MAY_BE_EMPTY
        assert not ask(port, 'rate(lockstep_no_such_total{model_name=~".*"}[1m])')
    finally:
        server.terminate()
        server.wait(10)


def ask(port: int, query: str) -> list[Any]:
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    reply = json.loads(fetch(url))
    assert reply["status"] == "success", reply
    found: list[Any] = reply["data"]["result"]
    return found


def until(condition: Any, timeout_s: float) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if found := condition():
                return found
        except OSError:
            pass
        time.sleep(0.3)
    return None
