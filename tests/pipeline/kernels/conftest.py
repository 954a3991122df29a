"""The emulated GPU, built once."""

import pytest

from tests.pipeline.kernels.emulator.emulated import Emulator, is_supported


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    if not is_supported():
        pytest.skip("the emulator needs g++ and an x86 processor")
    return Emulator(tmp_path_factory.mktemp("emulator"))
