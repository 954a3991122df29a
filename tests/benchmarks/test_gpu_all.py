"""The course on a GPU: each part once, a page with every gate, and no part that can not start."""

import json
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks import gpu_all

ROOT = Path(__file__).parents[2]


def course(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "scripts/measure_gpu.sh", "all", "--tiny", "--output", str(out), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.jobs
def test_a_part_is_run_once_and_the_page_has_what_it_printed(tmp_path: Path) -> None:
    first = course(tmp_path, "--parts", "environment")
    second = course(tmp_path, "--parts", "environment")

    assert first.returncode == second.returncode == 0, first.stderr
    assert "done before" not in first.stdout
    assert "environment: done before" in second.stdout
    page = (tmp_path / "page.md").read_text()
    assert "| yes | environment ended with code 0 |" in page
    assert (tmp_path / "environment.log").read_text().splitlines()[-1] in page


def test_a_part_that_failed_is_named_and_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "environment.json").write_text(json.dumps({"command": [], "code": 1, "seconds": 1}))

    assert gpu_all.main(["--tiny", "--parts", "environment", "--output", str(tmp_path)]) == 0
    assert "environment: exit code 0" in capsys.readouterr().out


def test_what_a_part_has_started_is_ended_with_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = ["sh", "-c", "sleep 600 & echo $!; wait"]

    assert gpu_all.run_command(command, log, seconds=1.0) is None
    with suppress(psutil.NoSuchProcess):
        child = psutil.Process(int(log.read_text()))
        while child.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.05)  # it ends when the system comes to it; `timeout` bounds the test
    assert gpu_all.run_command(["sh", "-c", "exit 3"], log, seconds=60.0) == 3


def test_the_files_with_tests_that_need_a_gpu_are_found() -> None:
    names = gpu_all.gpu_tests()

    assert "tests/pipeline/kernels/test_device.py" in names
    marked = [
        each for each in (ROOT / "tests").rglob("*.py") if "pytest.mark.gpu" in each.read_text()
    ]
    found = {str(each.relative_to(ROOT)) for each in marked if each != Path(__file__)}
    assert found == {name for name in names if name.startswith("tests/")}


def test_a_gate_holds_at_its_number_and_fails_beyond_it(tmp_path: Path) -> None:
    def overhead(stage_0: float, stage_3: float) -> list[bool]:
        rows = {"plain": 1.0, "stage 0": stage_0, "stage 3": stage_3}
        rounds = {name: [{"seconds": value}] * 3 for name, value in rows.items()}
        (tmp_path / "results.json").write_text(json.dumps({"overhead": rounds}))
        return [holds for _, holds in gpu_all.overhead_gates(tmp_path)]

    assert overhead(1.029, 1.079) == [True, True]
    assert overhead(1.031, 1.081) == [False, False]
