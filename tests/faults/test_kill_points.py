"""A process that is killed at a named point of training ends the job; the next start resumes."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.jobs import (
    PEER_SECONDS,
    Forked,
    assert_prefix,
    assert_same_end,
    run_forked,
    small_job,
)

POINTS = [
    pytest.param("engine.forward", marks=pytest.mark.faults),
    pytest.param("engine.backward", marks=pytest.mark.faults),
    pytest.param("engine.step", marks=pytest.mark.faults),
    # The other rank is then in a save that can't finish.
    pytest.param("checkpoint.before_write", marks=pytest.mark.faults),
    pytest.param("checkpoint.mid_file", marks=pytest.mark.faults),
    pytest.param("checkpoint.after_file", marks=pytest.mark.faults),
]


@pytest.mark.jobs
@pytest.mark.parametrize("point", POINTS)
def test_job_ends_when_a_rank_is_killed_and_resumes(
    point: str, inputs: Path, reference: Path, tmp_path: Path
) -> None:
    config = small_job(inputs, "sft", output_dir=tmp_path)

    with Forked(config, fault=f"{point}:1:5:kill") as job:
        job.processes[1].join(30)
        codes = job.wait(PEER_SECONDS)

    assert codes[0] in (1, -15)
    assert codes[1] == -9
    assert assert_prefix(tmp_path, reference) < 8

    assert run_forked(replace(config, resume=True)) == [0, 0]
    assert_same_end(tmp_path, reference, step=8)
