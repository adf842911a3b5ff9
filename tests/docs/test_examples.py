"""The examples of the documentation run as they stand, one page as one session, against a real server."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from client import Lockstep
from tests.cluster import Cluster
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.services
ROOT = Path(__file__).parents[2]
ADDRESS = "127.0.0.1:50051"  # what the pages say


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def address(model: Path) -> Iterator[str]:
    with Cluster(model) as cluster:
        yield cluster.address


def examples(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)


def test_the_client_page(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    session: dict[str, object] = {}
    found = examples("docs/client.md")
    assert len(found) >= 12
    for example in found:
        exec(compile(example.replace(ADDRESS, address), "docs/client.md", "exec"), session)
    assert capsys.readouterr().out
    client = session["client"]
    assert isinstance(client, Lockstep)
    client.close()


def test_the_readme(address: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for example in examples("README.md"):
        exec(compile(example.replace(ADDRESS, address), "README.md", "exec"), {"model_dir": model})
    assert capsys.readouterr().out


def test_every_link_of_the_pages_leads_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docker").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
