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
def test_the_kernels_say_how_they_were_built_and_how_fast_they_are(tmp_path: Path) -> None:
    sizes = ("--elements", "1000", "--tokens", "32")
    first = run("pipeline.kernels", *sizes, RLHF_PIPELINE_CACHE=str(tmp_path))
    second = run("pipeline.kernels", *sizes, RLHF_PIPELINE_CACHE=str(tmp_path))
    without = run("pipeline.kernels", *sizes, RLHF_PIPELINE_CACHE=str(tmp_path), CXX="none-such")

    assert f"kernels are kept in {tmp_path}" in first
    built = [line for line in first.splitlines() if line.startswith("| AdamW on cpu")]
    assert len(built) == sum(" s by " in line for line in built) == 3
    assert second.count("| kept as adamw-") == 3
    assert "| log-probabilities on cpu, 32 x 32768 |" in without
    missing = "PyTorch instead: the compiler that CXX names, none-such, was not"
    on_cpu = ("AdamW", "linear layer", "decode attention", "drawing")
    for operator in on_cpu:
        lines = [line for line in without.splitlines() if line.startswith(f"| {operator}")]
        lines = [line for line in lines if " on cpu" in line]
        assert lines
        assert all(missing in line for line in lines)
    for operator in ("decode attention on cuda", "keys and values into the cache", "sampler"):
        assert said_of(operator, first)


def said_of(operator: str, table: str) -> bool:
    """Whether there is a line that says what does it here: a kernel, or why PyTorch."""
    lines = [line for line in table.splitlines() if line.startswith(f"| {operator}")]
    done = ("built for ", "PyTorch instead: its kernel is for GPUs, and PyTorch finds none here")
    return bool(lines) and all(any(each in line for each in done) for line in lines)
