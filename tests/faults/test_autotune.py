"""A real tuning on the embedded model; a trial's process is killed in the middle."""

import json
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.jobs import Command

WORDS = [
    *("train.py", "--step", "1", "--deployment-type", "single_node", "--num-processes", "2"),
    *("--sft.batch_size", "8", "--sft.model.gradient_checkpointing", "false"),
    *("--sft.model.zero_stage", "0", "--autotune-steps", "3", "--autotune", "tune"),
]


def workers(pid: int) -> list[psutil.Process]:
    """The processes that train, below the launcher."""
    try:
        below = psutil.Process(pid).children(recursive=True)
        words = {process: process.cmdline() for process in below}
    except psutil.NoSuchProcess:
        return []
    launcher = "pipeline.launch.torchrun"
    return [
        each for each in below if "step1_sft.train" in words[each] and launcher not in words[each]
    ]


@pytest.mark.faults
def test_a_tuning_survives_a_killed_trial_and_prints_its_settings(tmp_path: Path) -> None:
    out = tmp_path / "out"
    log = out / "autotune" / "logs" / "step1_sft-002.log"

    with Command(*WORDS, "--output-dir", str(out)) as job:
        while not log.exists() or not workers(job.process.pid):
            assert job.process.poll() is None, job.output()
            time.sleep(0.05)
        workers(job.process.pid)[0].kill()
        assert job.wait(300) == 0, job.output()

    lines = (out / "autotune" / "trials.jsonl").read_text().splitlines()
    outcomes = [json.loads(line)["outcome"] for line in lines]
    assert outcomes[0] == "measured"
    assert outcomes[1] != "measured"
    assert "the fastest settings: " in job.output()
