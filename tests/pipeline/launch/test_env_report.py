import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from pipeline.launch.env_report import shown_variables

ROOT = Path(__file__).parents[3]


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pipeline.launch.env_report", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_report_has_what_a_problem_may_hang_on() -> None:
    found = json.loads(run("--json").stdout)

    assert list(found) == [
        *("code", "packages", "machine", "GPUs", "kernels", "network", "tools", "bandwidth"),
        "variables",
    ]
    assert found["packages"]["torch"] == version("torch")
    assert found["GPUs"]["torch sees"].startswith(str(torch.cuda.device_count()))
    assert set(found["kernels"]) == {"on CPUs", "on GPUs", "kept in"}
    assert found["bandwidth"]["main memory"].endswith(" GB/s")
    assert "gloo" in found["network"]["backends"]


def test_a_person_reads_it_as_lines_below_titles() -> None:
    lines = run().stdout.splitlines()

    assert "packages" in lines
    assert any(line.split() == ["torch", version("torch")] for line in lines)


def test_secrets_are_not_shown() -> None:
    shown = shown_variables(
        {"HF_TOKEN": "hf_x", "WANDB_API_KEY": "x", "NCCL_DEBUG": "INFO", "PATH": "/bin"}
    )

    assert shown == {
        "HF_TOKEN": "(set, not shown)",
        "NCCL_DEBUG": "INFO",
        "WANDB_API_KEY": "(set, not shown)",
    }


def test_a_word_it_does_not_take_is_a_sentence() -> None:
    ended = run("--yaml")

    assert (ended.returncode, ended.stderr) == (
        2,
        "error: env_report takes nothing but --json, got --yaml\n",
    )
