"""Cases of kernels on the emulated GPU, and faults planted in their sources."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.kernels.emulator.emulated import Emulator
from pipeline.kernels.operators import cases_of
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


def is_right(name: str, case: Any, emulator: Emulator) -> bool:
    """Whether an operator's kernel computes what the definition does; it may write its input."""
    cases, device = cases_of(name), torch.device("cpu")
    inputs = cases.inputs_of(case, device)
    with emulator.memory(*inputs.tensors(), schedule=case.schedule):
        out = cases.run(case, inputs, emulator.gpu())
    return cases.is_right(case, cases.inputs_of(case, device), out)
