"""The toy models, saved once."""

from pathlib import Path

import pytest

from tests.families import saved, tiny_causal_lm
from tests.step3_ppo.toy import save_models


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds actor and reward model."""
    directory = tmp_path_factory.mktemp("toy")
    save_models(directory)
    return directory


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tiny_causal_lm("llama"), tmp_path_factory.mktemp("llama"))
