"""A job says who failed, who is gone, who hangs and who is out of step, and ends in time."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pipeline.engine.engine import Engine
from pipeline.errors import DataError, JobFailed
from pipeline.parallel.mesh import current_mesh, cut_mesh
from pipeline.position import SAME_ORDER
from pipeline.watchdog.process import watching
from tests.distributed import rank, run_ranks
from tests.jobs import Job, run_job
from tests.pipeline.engine.test_stages import build, loss_of, settings


def engine_of(stage: int, *, shared_memory: bool) -> Engine:
    # PyTorch's own optimizer has a hook in its step, where a process may die.
    plain = settings(stage, max_norm=None, weight_decay=0.0, shared_memory=shared_memory)
    config = replace(plain, kernels="off")
    return Engine(
        build("llama", "fp32"),
        config,
        total_steps=10,
    )


def train(engine: Engine, steps: int = 2) -> None:
    for _ in range(steps):
        engine.backward(loss_of(engine, 0, 0, rank()))
        engine.step()


BOTH = pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "gloo"])
SHARED_OFTEN = pytest.mark.parametrize(
    "shared_memory",
    [
        pytest.param(True, id="shared memory"),
        pytest.param(False, id="gloo", marks=pytest.mark.faults),
    ],
)


def lines(job: Job) -> list[str]:
    return job.errors.splitlines()


def loss_fails(shared_memory: bool) -> None:
    engine = engine_of(3, shared_memory=shared_memory)
    train(engine)
    if rank() == 1:
        raise ValueError("labels are all masked")
    train(engine)


@SHARED_OFTEN
def test_the_error_of_one_rank_comes_first_and_the_others_say_one_line(
    shared_memory: bool,
) -> None:
    job = run_job(loss_fails, shared_memory)

    assert job.codes == [1, 1]
    assert lines(job)[0] == "Traceback (most recent call last):"
    assert "in loss_fails" in job.errors
    assert lines(job)[-2:] == [
        "ValueError: labels are all masked",
        "rank 0 stopped because rank 1 failed: ValueError: labels are all masked",
    ]
    assert job.errors.count("Traceback") == 1


def all_fail() -> None:
    current_mesh().world.sum(rank())
    raise ValueError("no such layer")


def test_an_error_that_all_ranks_meet_has_one_traceback() -> None:
    job = run_job(all_fail)

    assert job.codes == [1, 1]
    assert job.errors.count("Traceback") == 1
    assert lines(job)[-1].endswith("ValueError: no such layer")


def wrong_row(ranks: tuple[int, ...]) -> None:
    current_mesh().world.sum(rank())
    if rank() in ranks:
        raise DataError("rows.jsonl line 3 has no prompt")
    current_mesh().world.barrier()


@pytest.mark.jobs
def test_wrong_input_that_only_one_rank_meets_is_said() -> None:
    job = run_job(wrong_row, (1,))

    assert job.codes == [2, 2]
    assert lines(job) == [
        "error: rows.jsonl line 3 has no prompt",
        "rank 0 stopped because rank 1 failed: DataError: rows.jsonl line 3 has no prompt",
    ]


def test_wrong_input_that_all_ranks_meet_is_said_once() -> None:
    job = run_job(wrong_row, (0, 1, 2), world_size=3)

    assert job.codes == [2, 2, 2]
    assert lines(job) == ["error: rows.jsonl line 3 has no prompt"]


def killed(shared_memory: bool, place: str) -> None:
    engine = engine_of(3, shared_memory=shared_memory)
    train(engine)

    def die(*_: object) -> None:
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    if place == "forward":
        engine.model.model.layers[1].register_forward_pre_hook(die)
    elif place == "backward":
        engine.model.model.layers[1].register_full_backward_hook(die)
    else:
        engine.groups[0].optimizer.register_step_pre_hook(die)
    train(engine)


@pytest.mark.parametrize("place", ["forward", "backward", "step"])
@BOTH
def test_a_killed_rank_is_named(shared_memory: bool, place: str) -> None:
    job = run_job(killed, shared_memory, place)

    assert job.codes == [1, -signal.SIGKILL]
    assert job.seconds < 30
    assert len(lines(job)) == 1
    assert lines(job)[0].startswith(
        "rank 1 ended without a word (killed? out of memory?) while rank 0 waited for it at "
    )


def first_rank_dies() -> None:
    current_mesh().world.sum(1)
    if rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    current_mesh().world.sum(1)


def test_a_killed_rank_is_named_even_where_it_held_the_store() -> None:
    job = run_job(first_rank_dies, agent=False)

    assert job.codes == [-signal.SIGKILL, 1]
    assert any(each.startswith("rank 0 ended without a word") for each in lines(job))


def met_in_a_file() -> tuple[object, str]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), watching(30):
            current_mesh().world.sum(1)
            if rank() == 1:
                raise ValueError("of rank 1")
            current_mesh().world.barrier()
    except JobFailed as failed:
        return failed.code, said.getvalue()
    return 0, said.getvalue()


def test_processes_that_met_in_a_file_are_watched_too() -> None:
    first, second = run_ranks(met_in_a_file)

    assert first == (1, "rank 0 stopped because rank 1 failed: ValueError: of rank 1\n")
    assert second[0] == 1
    assert second[1].endswith("ValueError: of rank 1\n")


def told_to_stop_when_another_died() -> None:
    current_mesh().world.sum(1)
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGTERM)  # as torchrun does
    time.sleep(30)


def test_what_is_told_to_stop_because_another_died_says_so() -> None:
    job = run_job(told_to_stop_when_another_died)

    assert job.codes == [1, -signal.SIGKILL]
    assert lines(job)[0].startswith("rank 1 ended without a word")


def stop_on_signal() -> None:
    current_mesh().world.sum(1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)


def test_what_a_scheduler_stops_ends_in_silence() -> None:
    job = run_job(stop_on_signal)

    assert job.codes == [-signal.SIGTERM] * 2
    assert job.errors == ""


def hangs_in_a_copy() -> None:
    with cut_mesh(replicas=2, timeout_seconds=30):
        engine = engine_of(3, shared_memory=True)
        train(engine)
        if rank() == 3:
            time.sleep(1000)
        train(engine)


@pytest.mark.jobs
def test_a_rank_that_hangs_in_one_copy_of_a_model_is_named_by_the_others() -> None:
    job = run_job(hangs_in_a_copy, world_size=4, timeout_seconds=2)

    assert job.codes == [1] * 4
    assert lines(job)[0].startswith("rank 3 did not come to all_gather of root (engine), ")


def hangs_beside_its_layer() -> None:
    with cut_mesh(replicas=1, tp=2, timeout_seconds=30) as mesh:
        mesh.world.sum(1)
        if rank() == 1:
            time.sleep(1000)
        mesh.tensor.sum(1)


@pytest.mark.jobs
def test_a_rank_that_hangs_is_named_by_the_one_that_computes_each_layer_with_it() -> None:
    job = run_job(hangs_beside_its_layer, timeout_seconds=2)

    assert job.codes == [1] * 2
    assert lines(job)[0].startswith("rank 1 did not come to all_reduce of a few numbers, ")


def hangs(shared_memory: bool) -> None:
    engine = engine_of(3, shared_memory=shared_memory)
    train(engine)
    if rank() == 1:
        time.sleep(1000)
    train(engine)


@SHARED_OFTEN
def test_a_rank_that_hangs_is_named_with_all_stacks_and_ended(shared_memory: bool) -> None:
    job = run_job(hangs, shared_memory, timeout_seconds=2)

    assert job.codes == [1, 1]
    assert job.seconds < 2 + 10 + 5  # five to start
    assert lines(job)[0].startswith("rank 1 did not come to all_gather of root (engine), ")
    assert ", where rank 0 waited 2 s for it: its last was all_reduce of engine, " in lines(job)[0]
    assert "rank 0 is here:" in lines(job)
    assert "rank 1 stopped because it did not come to all_gather of root" in job.errors
    *_, of_the_hung_one = job.errors.partition("rank 1 is here:")
    assert "in hangs" in of_the_hung_one


def another_unit() -> None:
    """Units are gathered in the order of the step before: it is the way back that differs."""
    engine = engine_of(3, shared_memory=False)
    train(engine)
    if rank() == 1:
        layers = engine.model.model.layers
        layers[0], layers[1] = layers[1], layers[0]
    train(engine)


def leaves_out_a_unit() -> None:
    engine = engine_of(3, shared_memory=False)
    train(engine)
    if rank() == 1:
        del engine.model.model.layers[0]
    train(engine)


def one_more_sum() -> None:
    engine = engine_of(3, shared_memory=False)
    train(engine)
    if rank() == 1:
        current_mesh().world.sum(1)
    train(engine)


def another_shape() -> None:
    comm = engine_of(3, shared_memory=False).comm
    full = torch.ones(7680 * (rank() + 1))
    comm.all_gather(full, comm.piece(full), "model.layers.0").wait()


@pytest.mark.parametrize(
    ("body", "of_rank_0", "of_rank_1"),
    [
        pytest.param(
            another_unit,
            "reduce_scatter of lm_head (engine), ",
            "all_gather of model.layers.0 (engine), ",
            marks=pytest.mark.faults,
        ),
        pytest.param(
            leaves_out_a_unit,
            "all_gather of model.layers.0 (engine), ",
            "reduce_scatter of model.layers.1 (engine), ",
            marks=pytest.mark.faults,
        ),
        pytest.param(
            one_more_sum,
            "all_gather of root (engine), ",
            "all_reduce of a few numbers, ",
            marks=pytest.mark.faults,
        ),
        (
            another_shape,
            "all_gather of model.layers.0 (engine), 30720 bytes",
            "all_gather of model.layers.0 (engine), 61440 bytes",
        ),
    ],
)
def test_ranks_out_of_step_are_named_over_gloo(
    body: Callable[[], None], of_rank_0: str, of_rank_1: str
) -> None:
    job = run_job(body, timeout_seconds=3)

    assert 0 not in job.codes
    found = [each for each in lines(job) if each.endswith(("same order", "this ended rank 0"))]
    assert f"rank 0 came to {of_rank_0}" in found[0]
    assert f"rank 1 came to {of_rank_1}" in found[0]
    assert SAME_ORDER in found[0]


def in_another_order() -> None:
    """Of the same sizes, so that nothing else goes wrong."""
    comm = engine_of(0, shared_memory=False).comm
    for unit in ("a", "b") if rank() == 0 else ("b", "a"):
        full = torch.ones(64)
        comm.all_gather(full, comm.piece(full), unit).wait()
    comm.all_reduce(torch.zeros(4, dtype=torch.float64))


@pytest.mark.jobs
def test_collectives_in_another_order_are_named_at_the_norm_of_the_step() -> None:
    job = run_job(in_another_order)

    assert 0 not in job.codes
    assert "rank 0 was at all_gather of a (engine), 256 bytes while rank 1 was at" in job.errors


@pytest.mark.jobs
def test_a_step_under_torchrun_ends_with_the_code_of_the_rank_that_was_killed() -> None:
    ended = torchrun("killed")

    assert ended.returncode == 128 + signal.SIGKILL
    assert ended.stderr.startswith("rank 1 ended without a word (killed? out of memory?)")


@pytest.mark.jobs
def test_wrong_settings_that_only_one_rank_meets_are_said_under_torchrun() -> None:
    ended = torchrun("wrong setting")

    assert (ended.returncode, ended.stderr) == (2, "error: rank 1 has no such file\n")


@pytest.mark.faults
def test_wrong_settings_that_all_ranks_meet_are_said_once_under_torchrun() -> None:
    ended = torchrun("wrong settings")

    assert (ended.returncode, ended.stderr) == (2, "error: there is no such file\n")


def torchrun(case: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "pipeline.launch.torchrun", "--standalone"]
    return subprocess.run(
        [*launcher, "--nproc-per-node", "2", "-m", "tests.pipeline.watchdog.watched", case],
        capture_output=True,
        text=True,
        check=False,
    )
