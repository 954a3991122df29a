"""Autotuning of the embedded model, in which a trial's process is killed."""

import json
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.jobs import Command

ARGS = [
    *("train.py", "--step", "1", "--deployment-type", "single_node", "--num-processes", "2"),
    *("--sft.batch_size", "8", "--sft.model.gradient_checkpointing", "false"),
    *("--sft.model.zero_stage", "0", "--autotune-steps", "3", "--autotune", "tune"),
]


def find_workers(pid: int) -> list[psutil.Process]:
    """Return the training processes that the launcher started."""
    try:
        processes = psutil.Process(pid).children(recursive=True)
        commands = {process: process.cmdline() for process in processes}
    except psutil.NoSuchProcess:
        return []
    launcher = "pipeline.launch.torchrun"
    return [
        process
        for process, command in commands.items()
        if "step1_sft.train" in command and launcher not in command
    ]


@pytest.mark.faults
def test_autotune_survives_a_killed_trial_and_prints_settings(tmp_path: Path) -> None:
    out = tmp_path / "out"
    log = out / "autotune" / "logs" / "step1_sft-002.log"

    with Command(*ARGS, "--output-dir", str(out)) as job:
        while not log.exists() or not find_workers(job.process.pid):
            assert job.process.poll() is None, job.output()
            time.sleep(0.05)
        find_workers(job.process.pid)[0].kill()
        assert job.wait(300) == 0, job.output()
        assert "the fastest settings: " in job.output()

    lines = (out / "autotune" / "trials.jsonl").read_text().splitlines()
    outcomes = [json.loads(line)["outcome"] for line in lines]
    assert outcomes[0] == "measured"
    assert outcomes[1] != "measured"
