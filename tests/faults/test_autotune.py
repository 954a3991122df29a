"""A real tuning, on the embedded model, with a trial whose process is killed in the middle."""

import json
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.faults.jobs import Command

WORDS = [
    *("train.py", "--step", "1", "--deployment-type", "single_node", "--num-processes", "2"),
    *("--sft.batch_size", "8", "--autotune-steps", "3", "--autotune-trials", "3"),
]
SPACE = ["micro_batch_size=1,4", "zero_stage=0,3", "gradient_checkpointing=false"]


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
def test_a_tuning_survives_a_trial_that_is_killed_and_its_settings_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    log = out / "autotune" / "logs" / "step1_sft-002.log"

    with Command(
        *WORDS, "--output-dir", str(out), "--autotune", "tune", "--autotune-space", *SPACE
    ) as job:
        while not log.exists() or not workers(job.process.pid):
            assert job.process.poll() is None, job.output()
            time.sleep(0.05)
        workers(job.process.pid)[0].kill()
        assert job.wait(300) == 0, job.output()

    trials = [
        json.loads(line) for line in (out / "autotune" / "trials.jsonl").read_text().splitlines()
    ]
    assert [each["outcome"] for each in trials] == ["measured", "killed", "measured"]
    assert all(
        len(each["tokens_per_second"]) == 3 for each in trials if each["outcome"] == "measured"
    )
    best = out / "autotune" / "best.yaml"
    chosen = yaml.safe_load(best.read_text())["sft"]
    assert chosen["micro_batch_size"] in (1, 4)
    with Command("train.py", "--config", str(best), "--sft.max_steps", "2") as job:
        assert job.wait(120) == 0, job.output()
    assert (out / "step1_sft" / "result.json").is_file()
