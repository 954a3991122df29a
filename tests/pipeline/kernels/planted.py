"""Faults planted in the sources of kernels."""

from pathlib import Path

import pytest

from pipeline.kernels.toolchain import gpu as gpu_module

Fault = tuple[str, str]
"""A piece of a source, and what stands there instead."""


def plant(operator: str, fault: Fault, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have kernels compiled from a source with a fault; there is no other operator then."""
    before, after = fault
    text = (gpu_module.OPERATORS / operator / "cuda.cu").read_text()
    assert before in text
    (directory / operator).mkdir(parents=True)
    (directory / operator / "cuda.cu").write_text(text.replace(before, after))
    monkeypatch.setattr(gpu_module, "OPERATORS", directory)
