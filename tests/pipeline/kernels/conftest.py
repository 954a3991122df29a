"""The emulated GPU, built once, and faults planted in its kernels."""

from pathlib import Path

import pytest

from pipeline.kernels.emulator.emulated import Emulator, compiler_found
from tests.pipeline.kernels.planted import plant


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    if not compiler_found():
        pytest.skip("the emulator is built by g++")
    return Emulator(tmp_path_factory.mktemp("emulator"))


@pytest.fixture
def planted(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that the test names: an operator, and what is changed of its source."""
    operator, fault = request.param
    plant(operator, fault, tmp_path, monkeypatch)
