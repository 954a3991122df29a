"""A reader can follow an iteration: few files run in it, and few are loaded for it."""

import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import pytest

import step3_ppo.train
from pipeline.config import DataConfig
from tests.sources import PACKAGES, ROOT
from tests.step3_ppo.toy import toy_config


def in_packages(files: Iterable[str]) -> set[str]:
    """Those of the project's packages, relative to the repository."""
    paths = [Path(file).relative_to(ROOT) for file in files if file.startswith(f"{ROOT}/")]
    return {str(path) for path in paths if path.parts[0] in PACKAGES}


class Trace:
    """A profile function that collects the files that run within `iterate` of one step."""

    def __init__(self, step: int) -> None:
        self.step, self.running = step, False
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code is step3_ppo.train.iterate.__code__ and event in ("call", "return"):
            self.running = event == "call" and frame.f_locals["step"] == self.step
        if self.running:
            self.files.add(code.co_filename)


@pytest.mark.jobs
def test_an_iteration_runs_at_most_60_files(toy: Path, tmp_path: Path) -> None:
    trace = Trace(step=2)
    length = {"max_steps": 2, "epochs": 2.0, "max_prompt_length": 48}
    config = toy_config(toy, output_dir=tmp_path, data=DataConfig(max_eval_rows=2), **length)

    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        step3_ppo.train.train(config)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)

    files = in_packages(trace.files)
    assert {"step3_ppo/update.py", "inference/engine/slots.py"} < files
    assert len(files) <= 60, "\n".join(sorted(files))


@pytest.mark.jobs
def test_the_step_loads_at_most_220_files() -> None:
    program = "import sys, step3_ppo.train; print(*sys.modules.values(), sep='\\n')"

    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()

    files = in_packages(line.rpartition(" from '")[2].removesuffix("'>") for line in loaded)
    assert 100 < len(files) <= 220
