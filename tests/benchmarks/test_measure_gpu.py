"""What measures a GPU is right where that can be known without one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.ppo_cases_gpu import CASES
from pipeline.config import TrainedModelConfig
from tests.sources import ROOT


def run(*options: str, out: Path) -> subprocess.CompletedProcess[str]:
    command = ["env", f"OUT={out}", f"PYTHON={sys.executable}", "bash", "scripts/measure_gpu.sh"]
    command += options
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_parts_of_both_courses_and_the_cases_of_ppo_name_what_exists(tmp_path: Path) -> None:
    lists = [run(course, "--list", out=tmp_path).stdout for course in ("first", "speed")]

    words = " ".join(lists).split()
    files = {word for word in words if word.startswith(("tests/", "train."))}
    files |= {f"{word.replace('.', '/')}.py" for word in words if word.startswith("benchmarks.")}
    assert words.count("alone") + words.count("shared") == 14
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert len([TrainedModelConfig(**case) for case in CASES.values()]) == 15


def test_a_part_that_fails_is_a_row_and_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "ppo.log").mkdir()  # where its output belongs

    done = run("first", "ppo", "nccl", "--tiny", out=tmp_path)

    rows = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    found = [(row["name"], row["ok"], row.get("skipped")) for row in rows]
    assert found == [("ppo", False, None), ("nccl", True, "needs a GPU")]
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "1 of 2 rows are ok")


@pytest.mark.grid
@pytest.mark.parametrize("course", ["first", "speed"])
def test_a_whole_course_runs_with_toys(course: str, tmp_path: Path) -> None:
    done = run(course, "--tiny", out=tmp_path)

    assert done.returncode == 0, done.stdout
