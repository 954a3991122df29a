"""A job names the process that failed, was lost or hangs, and ends in time."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from pipeline.engine.engine import Engine
from pipeline.parallel.mesh import current_mesh
from pipeline.system.errors import DataError
from pipeline.watchdog.process import Heartbeat, find_straggler
from tests.distributed import rank
from tests.jobs import Job, run_job
from tests.pipeline.engine.test_stages import build, compute_loss, settings


def lines(job: Job) -> list[str]:
    return job.errors.splitlines()


def train(steps: int = 2) -> Engine:
    engine = Engine(build("llama", "fp32"), settings(3, max_norm=None), total_steps=10)
    for _ in range(steps):
        engine.backward(compute_loss(engine, 0, 0, rank()))
        engine.step()
    return engine


def loss_fails() -> None:
    engine = train()
    if rank() == 1:
        raise ValueError("labels are all masked")
    engine.backward(compute_loss(engine, 0, 0, rank()))


def test_the_error_of_one_rank_is_shown_and_named_by_the_others() -> None:
    job = run_job(loss_fails)

    assert job.codes == [1, 1]
    assert "in loss_fails" in job.errors
    assert "ValueError: labels are all masked" in lines(job)
    assert "rank 0 stopped because rank 1 failed: ValueError: labels are all masked" in lines(job)
    assert job.errors.count("Traceback") == 1


def wrong_row(ranks: tuple[int, ...]) -> None:
    current_mesh().world.sum(rank())
    if rank() in ranks:
        raise DataError("rows.jsonl line 3 has no prompt")
    current_mesh().world.barrier()


@pytest.mark.jobs
def test_wrong_input_that_one_rank_meets_is_shown() -> None:
    job = run_job(wrong_row, (1,))

    assert job.codes == [2, 2]
    assert sorted(lines(job)) == [
        "error: rows.jsonl line 3 has no prompt",
        "rank 0 stopped because rank 1 failed: DataError: rows.jsonl line 3 has no prompt",
    ]


def killed() -> None:
    engine = train()

    def die(*_: object) -> None:
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    engine.model.model.layers[1].register_full_backward_hook(die)
    engine.backward(compute_loss(engine, 0, 0, rank()))


def test_a_killed_rank_is_named() -> None:
    job = run_job(killed)

    assert job.codes == [1, -signal.SIGKILL]
    assert job.seconds < 30
    assert "rank 0 stopped because rank 1 was lost (killed? out of memory?)" in lines(job)[0]


def hangs() -> None:
    engine = train()
    if rank() == 1:
        time.sleep(1000)
    engine.backward(compute_loss(engine, 0, 0, rank()))


def test_a_rank_that_hangs_is_named_with_all_stacks_and_ended() -> None:
    job = run_job(hangs, timeout_seconds=2)

    assert job.codes == [1, 1]
    assert job.seconds < 17
    assert re.search(r"rank 1 did not reach all_gather of root \(engine\), .* rank 0 waited",
                     job.errors)  # fmt: skip
    assert "rank 0 is here:" in lines(job)
    *_, of_rank_1 = job.errors.partition("rank 1 is here:")
    assert "in hangs" in of_rank_1


def in_another_order() -> None:
    comm = train(0).comm
    for unit in ("a", "b") if rank() == 0 else ("b", "a"):
        full = torch.ones(64)
        comm.all_gather(full, comm.local_shard(full), unit).wait()
    comm.all_reduce(torch.zeros(4, dtype=torch.float64))


@pytest.mark.jobs
def test_collectives_in_another_order_end_the_job() -> None:
    job = run_job(in_another_order)

    assert 0 not in job.codes
    assert "all_gather of a (engine)" in job.errors
    assert "all_gather of b (engine)" in job.errors


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("case", "code", "message"),
    [
        ("killed", 128 + signal.SIGKILL, "rank 0 stopped because rank 1 was lost"),
        pytest.param("wrong settings", 2, "error: there is no such file\n", marks=pytest.mark.grid),
    ],
)
def test_a_step_under_torchrun_ends_with_the_code_of_the_rank_that_failed(
    case: str, code: int, message: str
) -> None:
    launcher = [sys.executable, "-m", "pipeline.launch.torchrun", "--standalone"]
    ended = subprocess.run(
        [*launcher, "--nproc-per-node", "2", "-m", "tests.pipeline.watchdog.watched", case],
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == code
    assert ended.stderr.startswith(message)
    assert ended.stderr.count("\n") == 1


def test_the_rank_that_is_furthest_behind_is_late() -> None:
    seen = {
        0: Heartbeat(7, "all_gather of a", 5.0, 9),
        1: Heartbeat(8, "all_reduce of b", 4.0, 9),
        2: Heartbeat(5, "barrier", 6.0, 9),
    }

    failure = find_straggler(seen, 5.0)

    assert failure is not None
    assert failure.rank == 2
    assert failure.message == (
        "rank 2 did not reach all_gather of a (collective 7), where rank 0 waited 5 s for it:"
        " its last was barrier (collective 5), 6 s ago"
    )
    assert find_straggler(seen, 5.1) is None
    assert find_straggler({0: seen[0], 1: seen[0]}, 1.0) is None
