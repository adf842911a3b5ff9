"""The images' package lists follow the project's, and the composed cluster keeps its promises on paper."""

import re
import tomllib
from pathlib import Path

import pytest

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
