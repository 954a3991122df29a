"""The toy models, saved once per session."""

from pathlib import Path

import pytest

from tests.step3_ppo.toy import save_models


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the toy models."""
    directory = tmp_path_factory.mktemp("toy")
    save_models(directory)
    return directory
