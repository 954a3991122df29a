"""An actor and rows for all tests of the step."""

from pathlib import Path

import pytest

from tests.step3_preference.toy import save_toy


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("preference")
    save_toy(directory)
    return directory
