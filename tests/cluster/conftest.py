import pytest

from tests.tiny_models import make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A random model of two layers that divides by 4, as a snapshot."""
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")
