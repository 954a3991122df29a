from pathlib import Path

import pytest

from tests.faults.jobs import make_start


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and rows that jobs start from."""
    directory = tmp_path_factory.mktemp("start")
    make_start(directory)
    return directory
