"""Limits on the files that an iteration runs and that the step loads."""

import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from step3_ppo.train import iterate, train
from tests.sources import PACKAGES, ROOT
from tests.step3_ppo.toy import FEW, toy_config


def project_files(files: Iterable[str]) -> set[str]:
    """Return the files of the project's packages, relative to the repository."""
    paths = [Path(file).relative_to(ROOT) for file in files if file.startswith(f"{ROOT}/")]
    return {str(path) for path in paths if path.parts[0] in PACKAGES}


@pytest.mark.jobs
def test_second_iteration_runs_at_most_60_files(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = {"max_steps": 2, "epochs": 2.0, "max_prompt_length": 48}
    config = toy_config(toy, output_dir=tmp_path, data=replace(FEW, max_eval_rows=2), **length)
    executed = set[str]()

    def run_traced(*args: Any, step: int) -> dict[str, float]:
        profile = (lambda frame, *_: executed.add(frame.f_code.co_filename)) if step == 2 else None
        threading.setprofile(profile)
        sys.setprofile(profile)
        try:
            return iterate(*args, step=step)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    monkeypatch.setattr("step3_ppo.train.iterate", run_traced)
    train(config)

    files = project_files(executed)
    assert {"step3_ppo/update.py", "inference/engine/slots.py"} < files
    assert len(files) <= 60, "\n".join(sorted(files))


@pytest.mark.grid
def test_step_loads_at_most_220_files() -> None:
    program = "import sys, step3_ppo.train; print(*sys.modules.values(), sep='\\n')"
    command = [sys.executable, "-c", program]
    loaded = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    lines = loaded.splitlines()
    files = project_files(line.rpartition(" from '")[2].removesuffix("'>") for line in lines)
    assert 100 < len(files) <= 220
