"""Fixtures of the generation tests."""

import pytest

from inference.engine import batch, decoder


@pytest.fixture(autouse=True)
def nothing_was_logged() -> None:
    """Messages that a process logs once are logged by each test, whichever ran before it."""
    batch._log_padded.cache_clear()
    decoder._log_once.cache_clear()
