"""A server for the tests of one file."""

from collections.abc import Iterator

import pytest

from tests.inference.serve.serving import Running, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running
