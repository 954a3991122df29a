"""The emulated GPU, built once."""

import pytest

from pipeline.kernels.emulator.emulated import Emulator, compiler_found


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    if not compiler_found():
        pytest.skip("the emulator is built by g++")
    return Emulator(tmp_path_factory.mktemp("emulator"))
