"""A disk that takes its time to write."""

import os
import time
from collections.abc import Sequence

import pytest


def slow_down_writes(monkeypatch: pytest.MonkeyPatch, *, seconds: float) -> None:
    """Every positional write of this process begins that much later."""
    write = os.pwritev

    def slow(file: int, parts: Sequence[memoryview], position: int) -> int:
        time.sleep(seconds)
        return write(file, parts, position)

    monkeypatch.setattr(os, "pwritev", slow)
