from pathlib import Path

import pytest

from tests.step3_ppo.toy import save_models


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random models that jobs start from."""
    directory = tmp_path_factory.mktemp("start")
    save_models(directory)
    return directory
