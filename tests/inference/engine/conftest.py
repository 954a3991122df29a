"""Fixtures of the generation tests."""

import gc
from collections.abc import Iterator

import pytest

from inference.engine import batch, decoder


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def nothing_was_logged() -> None:
    """Messages that a process logs once are logged by each test, whichever ran before it."""
    batch._log_padded.cache_clear()
    decoder._log_once.cache_clear()
