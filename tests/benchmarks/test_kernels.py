"""The benchmark of the kernels runs, and so does `python -m pipeline.kernels`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*words: str, **environment: str) -> str:
    command = [sys.executable, "-m", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT, env=os.environ | environment
    )
    return done.stdout


@pytest.mark.grid
def test_the_benchmark_compares_the_kernels_with_pytorch(tmp_path: Path) -> None:
    options = ("--quick", "--forms", "mixed", "--threads", "1")
    table = run("benchmarks.kernels", *options, "--output", str(tmp_path / "kernels.json"))

    assert "| 1M | 1 | mixed | ours |" in table
    assert "| 1M | 1 | mixed | torch |" in table
    assert "| plain, s | ours, s |" in table


@pytest.mark.jobs
def test_the_table_of_kernels_shows_what_is_built_and_why_not(tmp_path: Path) -> None:
    cache = str(tmp_path)
    first = run("pipeline.kernels", RLHF_PIPELINE_CACHE=cache)
    second = run("pipeline.kernels", RLHF_PIPELINE_CACHE=cache)
    without = run("pipeline.kernels", RLHF_PIPELINE_CACHE=cache, CXX="none-such")

    assert f"kernels are kept in {tmp_path}" in first
    rows = first.count(", CPU |")
    assert rows == first.count("built in") == second.count("| kept |") == 8
    assert without.count("PyTorch instead: the compiler that CXX names, none-such, was not") == 8
