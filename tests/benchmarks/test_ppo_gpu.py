"""The script that measures an iteration of PPO on a GPU runs from end to end without one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.ppo_gpu import gates

ROOT = Path(__file__).parents[2]


@pytest.mark.jobs
def test_the_whole_course_runs_with_toys(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.ppo_gpu", "--tiny", "--output", str(tmp_path)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    phases = found["generation"] + found["experience"] + found["training"]
    assert abs(found["iteration"] - phases) < 1e-9
    assert found["sequences_per_second"] == 4 / found["iteration"]
    assert 0 < found["sync"] < found["generation"]


def test_a_gate_holds_at_its_number_and_fails_beyond_it() -> None:
    at = {"sequences_per_second": 30.0, "generation_share": 0.45, "bandwidth_share": 0.6}
    beyond = {"sequences_per_second": 29.9, "generation_share": 0.46, "bandwidth_share": 0.59}

    assert [holds for _, holds in gates(at)] == [True, True, True]
    assert [holds for _, holds in gates(beyond)] == [False, False, False]
