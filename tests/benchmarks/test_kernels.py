"""The benchmark of the kernels runs, and so does `python -m pipeline.kernels`."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*words: str, **environment: str) -> str:
    command = [sys.executable, "-m", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT, env=os.environ | environment
    )
    return done.stdout


def test_the_benchmark_shows_every_way_beside_the_others(tmp_path: Path) -> None:
    options = ("--quick", "--forms", "mixed", "--threads", "1")
    said = run("benchmarks.kernels", *options, "--output", str(tmp_path / "kernels.json"))

    assert "fp32 bit-equal to the definition: True" in said
    for way in ("ours-mixed", "torch-mixed", "stream-mixed"):
        assert f"| 1 | {way} |" in said
    assert said.count("| any loss |") == said.count("| uniform |") == 1


def test_the_kernels_say_how_they_were_built_and_how_fast_they_are(tmp_path: Path) -> None:
    sizes = ("--elements", "1000", "--tokens", "32")
    first = run("pipeline.kernels", *sizes, RLHF_PIPELINE_CACHE=str(tmp_path))
    second = run("pipeline.kernels", *sizes, RLHF_PIPELINE_CACHE=str(tmp_path))
    without = run("pipeline.kernels", *sizes, RLHF_PIPELINE_CACHE=str(tmp_path), CXX="none-such")

    assert f"kernels are kept in {tmp_path}" in first
    assert first.count(" s by ") == second.count("| kept as adam-") == 3
    assert without.count("PyTorch instead: the compiler that CXX names, none-such, was not") == 3
    assert "| log-probabilities on cpu, 32 x 32768 |" in without
