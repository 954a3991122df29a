"""The GPU measurements, as far as they can be tested without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.device import FALLBACKS
from benchmarks.ppo_cases_gpu import CASES
from pipeline.config import TrainedModelConfig
from tests.sources import ROOT


def run_suite(*options: str, out: Path) -> subprocess.CompletedProcess[str]:
    command = ["env", f"OUT={out}", f"PYTHON={sys.executable}", "bash", "scripts/measure_gpu.sh"]
    command += options
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_messages_that_report_a_missing_kernel_are_logged_by_the_product() -> None:
    sources = [file for name in ("pipeline", "inference") for file in (ROOT / name).rglob("*.py")]
    text = "".join(file.read_text(encoding="utf-8") for file in sources)

    assert [prefix for prefix in FALLBACKS if f'logger.info("{prefix}' not in text] == []


def test_measurement_suites_list_existing_files_and_valid_ppo_cases(tmp_path: Path) -> None:
    outputs = [run_suite(suite, "--list", out=tmp_path).stdout for suite in ("first", "speed")]

    words = " ".join(outputs).split()
    files = {word for word in words if word.startswith(("tests/", "train."))}
    files |= {f"{word.replace('.', '/')}.py" for word in words if word.startswith("benchmarks.")}
    assert words.count("alone") + words.count("shared") == 14
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert len([TrainedModelConfig(**case) for case in CASES.values()]) == 15


def test_failed_measurement_is_reported_as_row_and_exit_code(tmp_path: Path) -> None:
    (tmp_path / "ppo.log").mkdir()  # in place of its log file

    result = run_suite("first", "ppo", "nccl", "--tiny", out=tmp_path)

    rows = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    outcomes = [(row["name"], row["ok"], row.get("skipped")) for row in rows]
    assert outcomes == [("ppo", False, None), ("nccl", True, "needs a GPU")]
    assert (result.returncode, result.stdout.splitlines()[-1]) == (1, "1 of 2 rows are ok")


@pytest.mark.grid
@pytest.mark.parametrize("suite", ["first", "speed"])
def test_measurement_suite_runs_on_tiny_models(suite: str, tmp_path: Path) -> None:
    result = run_suite(suite, "--tiny", out=tmp_path)

    assert result.returncode == 0, result.stdout
