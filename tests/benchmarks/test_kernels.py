"""The benchmark of the kernels runs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.grid
def test_the_benchmark_compares_the_kernels_with_pytorch(tmp_path: Path) -> None:
    options = ("--quick", "--forms", "mixed", "--threads", "1")
    command = [sys.executable, "-m", "benchmarks.kernels", *options]
    command += ["--output", str(tmp_path / "kernels.json")]
    table = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout

    assert "| 1M | 1 | mixed | ours |" in table
    assert "| 1M | 1 | mixed | torch |" in table
    assert "| plain, s | ours, s |" in table
