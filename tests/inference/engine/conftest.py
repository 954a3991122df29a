"""Fixtures of the generation tests."""

import gc
from collections.abc import Iterator

import pytest

from inference.engine import batch, decoder


@pytest.fixture
def gc_disabled() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def reset_logged_once() -> None:
    """Let every test log the messages that a process logs only once."""
    batch._log_padded.cache_clear()
    decoder._log_once.cache_clear()
