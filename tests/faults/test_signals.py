"""After Ctrl-C or a scheduler's signal at any time, the state is saved and --resume continues.

The exit code is 130 after Ctrl-C, 75 after a scheduler's signal.
"""

import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config import StepConfig
from pipeline.run.run import changed_settings
from pipeline.system.signals import DUPLICATE_SECONDS, EXIT_INTERRUPTED, EXIT_REQUEUE
from tests.faults.jobs import Command, Forked, assert_prefix, run_forked, small_job, step_args
from tests.test_resume import read_metrics

STEPS = 20


def signal_job(inputs: Path, out: Path) -> StepConfig:
    """Return a job that saves only when it receives a signal."""
    return small_job(inputs, "sft", output_dir=out, max_steps=STEPS, save_every=None)


@pytest.fixture(scope="module")
def long_reference(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run on two processes, with all checkpoints."""
    out = tmp_path_factory.mktemp("reference")
    assert run_forked(small_job(inputs, "sft", output_dir=out, max_steps=STEPS)) == [0, 0]
    return out


def count_lines(out: Path) -> int:
    """Return the number of metrics lines so far."""
    path = out / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def wait_for(condition: Callable[[], object], job: Forked | Command) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, job.output()
        time.sleep(0.005)


def wait_for_lines(out: Path, count: int, job: Forked | Command) -> None:
    wait_for(lambda: count_lines(out) >= count, job)


def exit_code(number: signal.Signals) -> int:
    return EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_REQUEUE


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.faults),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.faults),
    ],
)
def test_signal_in_the_loop_saves_the_current_step(
    number: signal.Signals, inputs: Path, long_reference: Path, tmp_path: Path
) -> None:
    config = signal_job(inputs, tmp_path)

    with Forked(config) as job:
        wait_for_lines(tmp_path, 4, job)
        job.signal(number)
        codes = job.wait()
        output = job.output()

    assert codes == [exit_code(number)] * 2
    step = assert_prefix(tmp_path, long_reference)
    assert step >= 3
    assert (
        f"stopped after step {step} of {STEPS} and has saved its state;"
        f" --resume continues after step {step}\n" in output
    )
    assert [line["step"] for line in read_metrics(tmp_path)][-1] == step  # no further step
    with Forked(replace(config, resume=True)) as job:
        assert job.wait() == [0, 0]
        assert f"resuming step1_sft after step {step}\n" in job.output()
    assert read_metrics(tmp_path) == read_metrics(long_reference)
    assert read_model(tmp_path) == read_model(long_reference)


def read_model(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def test_second_ctrl_c_aborts_a_hanging_step(inputs: Path, tmp_path: Path) -> None:
    """One process sleeps in its third step; the other waits in a collective."""
    with Forked(signal_job(inputs, tmp_path), fault="engine.step:1:3:hang") as job:
        wait_for(lambda: "engine.step hangs\n" in job.output(), job)
        job.signal(signal.SIGINT)
        wait_for(lambda: "finishing the current step, saving the state" in job.output(), job)
        assert all(process.is_alive() for process in job.processes)
        time.sleep(DUPLICATE_SECONDS + 0.2)
        job.signal(signal.SIGINT)

        assert job.wait(10) == [EXIT_INTERRUPTED] * 2
        assert "step1_sft was aborted; --resume starts from step 1\n" in job.output()
        assert "Traceback" not in job.output()


@pytest.mark.jobs
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.faults), signal.SIGTERM]
)
def test_signal_before_the_training_loop_is_no_failure(
    number: signal.Signals, inputs: Path, tmp_path: Path
) -> None:
    with Forked(signal_job(inputs, tmp_path), fault="steps.begin:1:1:hang") as job:
        wait_for(lambda: "steps.begin hangs\n" in job.output(), job)
        time.sleep(0.5)  # the first process enters its loop
        job.signal(number)
        codes = job.wait(10)

        # Before the loop SIGTERM ends a process by default, and the launcher ends the others.
        allowed = {exit_code(number)} | ({-signal.SIGTERM} if number == signal.SIGTERM else set())
        assert set(codes) <= allowed
        assert "Traceback" not in job.output()
        assert "rank" not in job.output()


@pytest.mark.jobs
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.faults), 2])
def test_ctrl_c_during_export_loses_no_step(processes: int, inputs: Path, tmp_path: Path) -> None:
    """The second process waits for the first, which writes."""
    config = small_job(inputs, "sft", output_dir=tmp_path / "whole", save_every="1h")
    assert set(run_forked(config, world_size=processes)) == {0}
    config = replace(config, output_dir=tmp_path / "run")
    with Forked(config, world_size=processes, fault="export.before_replace:0:1:hang") as job:
        wait_for(lambda: "export.before_replace hangs\n" in job.output(), job)
        job.signal(signal.SIGINT)

        assert job.wait(10) == [EXIT_INTERRUPTED] * processes
        assert (
            "step1_sft stopped after step 8 of 8; --resume continues after step 8" in job.output()
        )
        assert "Traceback" not in job.output()

    with Forked(replace(config, resume=True), world_size=processes) as job:
        assert set(job.wait()) == {0}
        assert "resuming step1_sft after step 8\n" in job.output()
        assert " step 8/8 " not in job.output()  # no step is repeated
    assert read_metrics(tmp_path / "run") == read_metrics(tmp_path / "whole")
    assert read_model(tmp_path / "run") == read_model(tmp_path / "whole")


def train_args(config: StepConfig, out: Path) -> list[str]:
    """Return the `train.py` command with the settings of a step 1."""
    args = ["train.py", "--step", "1", "--output-dir", str(out), "--deployment-type"]
    args += ["single_node", "--num-processes", "2"]
    for name, value in changed_settings(config).items():
        values = value if isinstance(value, list | tuple) else [value]
        args += [f"--sft.{name}", *("null" if item is None else str(item) for item in values)]
    return args


@pytest.mark.faults
@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("train.py", signal.SIGINT),
        ("train.py", signal.SIGTERM),
        ("step1_sft.train", signal.SIGINT),
        ("step1_sft.train", signal.SIGUSR1),
    ],
)
def test_commands_save_on_a_signal_and_resume(
    command: str, number: signal.Signals, inputs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run" / "step1_sft"
    out.parent.mkdir()
    config = small_job(inputs, "sft", output_dir=out, max_steps=60)
    reference = tmp_path / "whole"
    is_step = command != "train.py"
    world_size = 1 if is_step else 2
    assert set(run_forked(replace(config, output_dir=reference), world_size=world_size)) == {0}
    config = replace(config, save_every=None)
    args = step_args(config, processes=None) if is_step else train_args(config, out.parent)

    with Command(*args) as job:
        wait_for_lines(out, 1, job)
        time.sleep(random.Random(number).uniform(0, 0.5))
        job.process.send_signal(number)
        assert job.wait() == exit_code(number), job.output()
        step = assert_prefix(out, reference)
        assert f"--resume continues after step {step}\n" in job.output()
    assert [line["step"] for line in read_metrics(out)][-1] == step

    with Command(*args, "--resume") as job:
        assert job.wait() == 0, job.output()
    assert read_metrics(out) == read_metrics(reference)
    assert read_model(out) == read_model(reference)
