"""A job killed at any instant is a prefix of the uninterrupted run, and resumes to the same result.

The instants are uniform over the wall time of a full run that saves after every step. Imports are
done; starting, loading, computing, saving, evaluating and exporting are all interrupted.
"""

import logging
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pipeline.config import StepConfig
from tests.faults.jobs import (
    PEER_SECONDS,
    Forked,
    assert_prefix,
    assert_same_end,
    run_forked,
    small_job,
)

logger = logging.getLogger(__name__)


@dataclass
class Tally:
    """Number of kills, by what they interrupted."""

    kills: int = 0
    in_a_save: int = 0
    in_training: int = 0
    completed: int = 0


def run_and_kill(config: StepConfig, seconds: float, rng: random.Random) -> bool:
    """Kill one or all ranks of the job at a random instant; return whether any was alive."""
    victims = rng.choice([(0,), (1,), (0, 1), (0, 1)])
    with Forked(config) as job:
        time.sleep(rng.uniform(0, seconds))
        killed = [rank for rank in victims if job.processes[rank].is_alive()]
        for rank in killed:
            job.processes[rank].kill()
        codes = job.wait(PEER_SECONDS)  # the remaining processes end as well
    died = [rank for rank, code in enumerate(codes) if code == -9]
    assert set(died) <= set(killed)
    assert died or codes == [0, 0]
    return bool(died)


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("step", "steps", "kills"),
    [
        pytest.param("sft", 8, 3, id="sft, 3"),
        pytest.param("sft", 30, 50, id="sft, 50", marks=pytest.mark.faults),
        pytest.param("pretrain", 12, 20, id="pretrain, 20", marks=pytest.mark.faults),
        pytest.param("reward", 12, 20, id="reward, 20", marks=pytest.mark.faults),
        pytest.param("ppo", 5, 20, id="ppo, 20", marks=pytest.mark.faults),
    ],
)
@pytest.mark.timeout(1200)
def test_randomly_killed_job_is_a_prefix_of_the_uninterrupted_run(
    step: str, steps: int, kills: int, inputs: Path, tmp_path: Path
) -> None:
    reference = tmp_path / "reference"
    config = small_job(inputs, step, output_dir=reference, max_steps=steps)
    assert run_forked(replace(config, max_steps=1)) == [0, 0]
    start = time.monotonic()
    assert run_forked(config) == [0, 0]
    seconds = time.monotonic() - start
    rng = random.Random(kills)
    tally = Tally()

    while tally.kills < kills:
        out = tmp_path / f"run {tally.completed}"
        job, done = replace(config, output_dir=out), 0
        while tally.kills < kills and run_and_kill(job, seconds, rng):
            tally.kills += 1
            tally.in_a_save += any((out / "checkpoints").glob(".writing-*/rank*"))
            job = replace(job, resume=True)
            before, done = done, assert_prefix(out, reference)
            tally.in_training += done > before
            assert done >= before
        if not (out / "result.json").exists():
            assert run_forked(job) == [0, 0]
        assert_same_end(out, reference, step=steps)
        tally.completed += 1

    logger.info("%s", tally)  # shown with --log-cli-level=INFO
    if kills >= 50:
        assert tally.in_training > 5, tally
        assert tally.in_a_save > 5, tally
