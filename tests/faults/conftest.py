from pathlib import Path

import pytest

from tests.faults.jobs import make_start, run_forked, small


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and rows that jobs start from."""
    directory = tmp_path_factory.mktemp("start")
    make_start(directory)
    return directory


@pytest.fixture(scope="session")
def reference(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps of step 1 in two processes that nothing disturbs, every checkpoint kept."""
    out = tmp_path_factory.mktemp("reference")
    assert run_forked(small(start, "sft", output_dir=out)) == [0, 0]
    return out
