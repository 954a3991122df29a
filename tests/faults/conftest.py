from pathlib import Path

import pytest

from tests.faults.jobs import run_forked, small_job, write_inputs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the models and rows of the jobs."""
    directory = tmp_path_factory.mktemp("inputs")
    write_inputs(directory)
    return directory


@pytest.fixture(scope="session")
def reference(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight uninterrupted steps of step 1 on two processes, with all checkpoints."""
    out = tmp_path_factory.mktemp("reference")
    assert run_forked(small_job(inputs, "sft", output_dir=out)) == [0, 0]
    return out
