"""The images' package lists follow the project's, and the composed cluster keeps its promises on paper."""

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc import app as scheduler
from worker_svc import app as worker

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"


def names(text: str) -> set[str]:
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return {re.split(r"[<>=;\[]", line)[0].lower() for line in lines if line and not line.startswith("-r")}


def test_the_images_install_what_the_project_needs() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    project = {re.split(r"[<>=;\[ ]", entry)[0].lower() for entry in needed}
    scheduler = names((DOCKER / "packages-scheduler.txt").read_text())
    worker = scheduler | names((DOCKER / "packages-worker.txt").read_text()) | {"torch"}
    assert worker == project
    assert "torch" not in scheduler


def test_every_pinned_package_is_pinned_once() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pinned = [line.partition("==")[0].lower() for line in lines]
    assert len(set(pinned)) == len(pinned) and all("==" in line for line in lines)
    assert "torch" not in pinned


@pytest.mark.parametrize("wanted", ["USER lockstep", "HEALTHCHECK", "STOPSIGNAL SIGTERM"])
def test_the_dockerfile_has(wanted: str) -> None:
    assert wanted in (DOCKER / "Dockerfile").read_text()


def test_the_composed_cluster_waits_restarts_and_stops_gracefully() -> None:
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    for name in ("scheduler", "worker-0", "worker-1"):
        assert services[name]["restart"] == "unless-stopped"
        assert "depends_on" not in services[name]  # start order is irrelevant
        assert int(services[name]["stop_grace_period"].rstrip("s")) >= 30
        assert any(":ro" in volume for volume in services[name]["volumes"])
    assert all("shm_size" in services[f"worker-{rank}"] for rank in (0, 1))
    assert "--patience" in services["loadtest"]["command"] and services["loadtest"]["profiles"] == ["load"]
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", []))


def composed(*files: str) -> dict[str, Any]:
    """The services of these files over one another, as docker compose merges them."""
    yaml = pytest.importorskip("yaml")

    def merge(below: Any, above: Any) -> Any:
        if isinstance(below, dict) and isinstance(above, dict):
            return {key: merge(below.get(key), above.get(key)) for key in {**below, **above}}
        return below if above is None else above

    merged: Any = {}
    for file in files:
        merged = merge(merged, yaml.safe_load((DOCKER / file).read_text())["services"])
    return dict(merged)


@pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "compose.gpu.yaml")], ids=["cpu", "gpu"])
def test_every_command_of_a_composed_cluster_is_one_that_its_program_takes(files: tuple[str, ...]) -> None:
    services = composed(*files)
    config, _ = scheduler.configure(shlex.split(services["scheduler"]["command"]))
    assert config.workers.addresses == ("worker-0:50061", "worker-1:50061")
    for rank, address in enumerate(config.workers.addresses):
        options = worker._parser().parse_args(shlex.split(services[f"worker-{rank}"]["command"]))
        assert (options.rank, options.tp, options.advertise) == (rank, 2, address.partition(":")[0])
        assert options.listen.endswith(":50061") and services[f"worker-{rank}"]["image"] == "lockstep-worker"
        assert str(options.model) == services[f"worker-{rank}"]["volumes"][0].split(":")[-2]


def test_on_gpus_each_worker_reserves_one_of_its_own() -> None:
    services = composed("compose.yaml", "compose.gpu.yaml")
    reserved = []
    for rank in (0, 1):
        (device,) = services[f"worker-{rank}"]["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"] and "count" not in device
        reserved += device["device_ids"]
        # what a container sees of one GPU is its first, and a process group over NCCL needs an index
        assert "--device cuda:0" in services[f"worker-{rank}"]["command"]
        assert "restart" in services[f"worker-{rank}"]  # what the file does not say stays
    assert sorted(reserved) == ["0", "1"]
    config, _ = scheduler.configure(shlex.split(services["scheduler"]["command"]))
    assert (config.engine.block_size, config.engine.pipeline_depth) == (64, 3)


def test_the_monitoring_parts_find_each_other() -> None:
    """Grafana's files lie where it looks, name each other as they are called, and Prometheus asks the scheduler."""
    yaml = pytest.importorskip("yaml")
    services = composed("compose.yaml")
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    (provider,) = yaml.safe_load((DOCKER / "grafana/provisioning/dashboards/lockstep.yaml").read_text())["providers"]
    assert provider["options"]["path"] == mounts["./grafana/dashboards"] and provider["type"] == "file"
    (source,) = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in services and source["access"] == "proxy"
    (job,) = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    config, _ = scheduler.configure(shlex.split(services["scheduler"]["command"]))
    assert config.metrics is not None and target == f"scheduler:{config.metrics[1]}"
    shared = set(services["scheduler"]["networks"]) & set(services["prometheus"]["networks"])
    assert shared & set(services["grafana"]["networks"])


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    """What its model asks of a dashboard: ids, a grid of 24 columns without overlaps, sources and queries by name."""
    yaml = pytest.importorskip("yaml")
    dashboard = json.loads((DOCKER / "grafana/dashboards/lockstep.json").read_text())
    (source,) = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert dashboard["uid"] and dashboard["title"] and "id" not in dashboard and "__inputs" not in dashboard
    assert 36 <= dashboard["schemaVersion"] <= 41
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert (
            panel["type"] in {"stat", "timeseries", "heatmap", "table", "bargauge", "gauge", "row"} and panel["title"]
        )
        grid = panel["gridPos"]
        assert grid["x"] >= 0 and grid["w"] > 0 and grid["h"] > 0 and grid["x"] + grid["w"] <= 24
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["datasource"] == {"type": source["type"], "uid": source["uid"]}
        assert {"defaults", "overrides"} <= set(panel["fieldConfig"])
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)
        for target in panel["targets"]:
            assert (
                target["expr"].count("(") == target["expr"].count(")") and target["datasource"] == panel["datasource"]
            )
            named = set(re.findall(r"\$(\w+)", target["expr"]))
            assert named <= {"__rate_interval", *(variable["name"] for variable in dashboard["templating"]["list"])}


def test_workers_on_gpus_take_one_each() -> None:
    from scheduler_svc.up import device_of

    assert [device_of("cuda", rank, 2) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert (device_of("cuda", 0, 1), device_of("cuda:3", 0, 1), device_of("cpu", 1, 2)) == ("cuda", "cuda:3", "cpu")
