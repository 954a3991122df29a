"""A job reports the process that failed, was lost or hangs, and ends in time."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from pipeline.engine.engine import Engine
from pipeline.parallel.mesh import current_mesh
from pipeline.system.errors import DataError
from pipeline.watchdog.process import Heartbeat, find_straggler
from tests.distributed import rank
from tests.jobs import Job, run_job
from tests.pipeline.engine.test_stages import build, compute_loss, settings


def errors(job: Job) -> list[str]:
    return job.errors.splitlines()


def train(steps: int = 2) -> Engine:
    engine = Engine(build("llama", "fp32"), settings(3, max_norm=None), total_steps=10)
    for _ in range(steps):
        engine.backward(compute_loss(engine, 0, 0, rank()))
        engine.step()
    return engine


def fail_on_rank_1() -> None:
    engine = train()
    if rank() == 1:
        raise ValueError("labels are all masked")
    engine.backward(compute_loss(engine, 0, 0, rank()))


def test_error_of_one_rank_is_shown_and_reported_by_the_others() -> None:
    job = run_job(fail_on_rank_1)

    assert job.codes == [1, 1]
    assert "in fail_on_rank_1" in job.errors
    assert "ValueError: labels are all masked" in errors(job)
    assert "rank 0 stopped because rank 1 failed: ValueError: labels are all masked" in errors(job)
    assert job.errors.count("Traceback") == 1


def raise_on_rank_1(error: type[Exception], message: str) -> None:
    current_mesh().world.sum(rank())
    if rank() == 1:
        raise error(message)
    current_mesh().world.barrier()


@pytest.mark.jobs
def test_data_error_of_one_rank_is_shown_and_exits_with_2() -> None:
    job = run_job(raise_on_rank_1, DataError, "rows.jsonl line 3 has no prompt")

    assert job.codes == [2, 2]
    assert sorted(errors(job)) == [
        "error: rows.jsonl line 3 has no prompt",
        "rank 0 stopped because rank 1 failed: DataError: rows.jsonl line 3 has no prompt",
    ]


@pytest.mark.jobs
def test_lack_of_memory_for_nccl_exits_with_79() -> None:
    job = run_job(raise_on_rank_1, dist.DistBackendError, "NCCL: Cuda failure 2 'out of memory'")

    assert job.codes == [79, 79]


def kill_rank_1() -> None:
    engine = train()

    def die(*_: object) -> None:
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    engine.model.model.layers[1].register_full_backward_hook(die)
    engine.backward(compute_loss(engine, 0, 0, rank()))


def test_killed_rank_is_reported() -> None:
    job = run_job(kill_rank_1)

    assert job.codes == [1, -signal.SIGKILL]
    assert job.seconds < 30
    assert "rank 0 stopped because rank 1 was lost (killed? out of memory?)" in errors(job)[0]


def hang_on_rank_1() -> None:
    engine = train()
    if rank() == 1:
        time.sleep(1000)
    engine.backward(compute_loss(engine, 0, 0, rank()))


def test_hanging_rank_is_reported_with_all_stacks() -> None:
    job = run_job(hang_on_rank_1, timeout_seconds=2)

    assert job.codes == [1, 1]
    assert job.seconds < 17
    assert re.search(r"rank 1 did not reach all_gather of root \(engine\), .* rank 0 waited",
                     job.errors)  # fmt: skip
    assert "rank 0 is here:" in errors(job)
    *_, stack = job.errors.partition("rank 1 is here:")
    assert "in hang_on_rank_1" in stack


def run_in_different_order() -> None:
    comm = train(0).comm
    for unit in ("a", "b") if rank() == 0 else ("b", "a"):
        full = torch.ones(64)
        comm.all_gather(full, comm.local_shard(full), unit).wait()
    comm.all_reduce(torch.zeros(4, dtype=torch.float64))


@pytest.mark.jobs
def test_collectives_in_different_order_end_the_job() -> None:
    job = run_job(run_in_different_order)

    assert 0 not in job.codes
    assert "all_gather of a (engine)" in job.errors
    assert "all_gather of b (engine)" in job.errors


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("case", "code", "message"),
    [
        ("killed", 128 + signal.SIGKILL, "rank 0 stopped because rank 1 was lost"),
        ("wrong settings", 2, "error: there is no such file\n"),
    ],
)
def test_step_under_torchrun_exits_with_the_code_of_the_failed_rank(
    case: str, code: int, message: str
) -> None:
    launcher = [sys.executable, "-m", "pipeline.launch.torchrun", "--standalone"]
    result = subprocess.run(
        [*launcher, "--nproc-per-node", "2", "-m", "tests.pipeline.watchdog.watched", case],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (result.returncode, result.stdout) == (code, "")
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


def test_straggler_is_the_rank_that_is_furthest_behind() -> None:
    heartbeats = {
        0: Heartbeat(7, "all_gather of a", 5.0, 9),
        1: Heartbeat(8, "all_reduce of b", 4.0, 9),
        2: Heartbeat(5, "barrier", 6.0, 9),
    }

    failure = find_straggler(heartbeats, 5.0)

    assert failure is not None
    assert failure.rank == 2
    assert failure.message == (
        "rank 2 did not reach all_gather of a (collective 7), where rank 0 waited 5 s for it:"
        " it was last at barrier (collective 5), 6 s ago"
    )
    assert find_straggler(heartbeats, 5.1) is None
    assert find_straggler({0: heartbeats[0], 1: heartbeats[0]}, 1.0) is None
