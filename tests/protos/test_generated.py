"""The committed code of the .proto files is what the pinned compiler makes of them."""

from pathlib import Path

import pytest

from protos.generate import generate

PROTOS = Path(__file__).parents[2] / "protos"
NAMES = sorted(path.name for path in PROTOS.glob("*_pb2*.py*"))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("generated")
    (target / "protos").mkdir()
    generate(target)
    return target / "protos"


def test_every_generated_file_is_committed(fresh: Path) -> None:
    assert NAMES == sorted(path.name for path in fresh.iterdir()) and len(NAMES) == 6


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_code_is_not_stale(fresh: Path, name: str) -> None:
    assert (PROTOS / name).read_text() == (fresh / name).read_text(), "run `make protos`"


def test_a_changed_proto_would_be_noticed(fresh: Path) -> None:
    changed = (fresh / "generation_pb2.pyi").read_text().replace("expected_fingerprint", "wanted_fingerprint")
    assert (PROTOS / "generation_pb2.pyi").read_text() != changed
