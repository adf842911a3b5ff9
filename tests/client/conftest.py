from collections.abc import Iterator

import pytest

from tests.client.mock_server import MockServer


@pytest.fixture
def server() -> Iterator[MockServer]:
    with MockServer() as mock:
        yield mock
