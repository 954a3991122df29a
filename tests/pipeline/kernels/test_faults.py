"""Faults planted in the kernels for GPUs are found by the cases that test them."""

from importlib import import_module
from pathlib import Path

import pytest

from pipeline.kernels.emulator.emulated import Emulator
from pipeline.kernels.operators import operators
from tests.pipeline.kernels.emulation import is_right, plant

MODULES = {
    name: import_module(f"tests.pipeline.kernels.{name}.faults") for name in operators(on_gpu=True)
}


def are_right(name: str, emulator: Emulator) -> bool:
    module = MODULES[name]
    try:
        for check in getattr(module, "CHECKS", ()):
            check(emulator)
        return all(is_right(name, case, emulator) for case in module.CASES)
    except AssertionError:
        return False


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "fault"), [(name, each) for name, module in MODULES.items() for each in module.FAULTS]
)
def test_a_planted_fault_is_found(
    name: str, fault: str, emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(name, MODULES[name].FAULTS[fault], tmp_path, monkeypatch)

    assert not are_right(name, emulator)


@pytest.mark.grid
@pytest.mark.parametrize("name", MODULES)
def test_without_a_planted_fault_the_same_cases_pass(name: str, emulator: Emulator) -> None:
    assert are_right(name, emulator)
