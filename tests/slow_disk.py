"""A slow disk."""

import os
import time
from collections.abc import Sequence

import pytest


def slow_down_writes(monkeypatch: pytest.MonkeyPatch, *, seconds: float) -> None:
    """Delay every `pwritev` of this process."""
    write = os.pwritev

    def slow(file: int, buffers: Sequence[memoryview], position: int) -> int:
        time.sleep(seconds)
        return write(file, buffers, position)

    monkeypatch.setattr(os, "pwritev", slow)
