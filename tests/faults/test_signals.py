"""Ctrl-C or a scheduler's signal, whenever it comes: the state is saved, --resume continues.

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
from pipeline.system.signals import EXIT_INTERRUPTED, EXIT_REQUEUE, SAME_SECONDS
from tests.faults.jobs import Command, Forked, assert_prefix, run_forked, small, step_words
from tests.test_resume import read_metrics

STEPS = 20


def make_job(start: Path, out: Path) -> StepConfig:
    """Saves only because of the signal."""
    return small(start, "sft", output_dir=out, max_steps=STEPS, save_every=None)


@pytest.fixture(scope="module")
def long_reference(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes that nothing disturbs, which keeps every checkpoint."""
    out = tmp_path_factory.mktemp("reference")
    assert run_forked(small(start, "sft", output_dir=out, max_steps=STEPS)) == [0, 0]
    return out


def lines(out: Path) -> int:
    """Of metrics so far."""
    path = out / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def wait_for(condition: Callable[[], object], job: Forked | Command) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, job.output()
        time.sleep(0.005)


def wait_for_lines(out: Path, count: int, job: Forked | Command) -> None:
    wait_for(lambda: lines(out) >= count, job)


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
def test_a_signal_in_the_loop_saves_the_step_at_hand(
    number: signal.Signals, start: Path, long_reference: Path, tmp_path: Path
) -> None:
    config = make_job(start, tmp_path)

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
    assert [line["step"] for line in read_metrics(tmp_path)][-1] == step  # not one step more
    with Forked(replace(config, resume=True)) as job:
        assert job.wait() == [0, 0]
        assert f"resuming step1_sft after step {step}\n" in job.output()
    assert read_metrics(tmp_path) == read_metrics(long_reference)
    assert model(tmp_path) == model(long_reference)


def model(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def test_ctrl_c_is_answered_within_a_step_that_hangs_and_a_second_one_aborts(
    start: Path, tmp_path: Path
) -> None:
    """One process sleeps in its third step, the other waits for it in a collective."""
    with Forked(make_job(start, tmp_path), fault="engine.step:1:3:hang") as job:
        wait_for(lambda: "engine.step hangs\n" in job.output(), job)
        job.signal(signal.SIGINT)
        wait_for(lambda: "finishing the current step, saving the state" in job.output(), job)
        assert all(process.is_alive() for process in job.processes)
        time.sleep(SAME_SECONDS + 0.2)
        job.signal(signal.SIGINT)

        assert job.wait(10) == [EXIT_INTERRUPTED] * 2
        assert "step1_sft was aborted; --resume starts from step 1\n" in job.output()
        assert "Traceback" not in job.output()


@pytest.mark.jobs
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.faults), signal.SIGTERM]
)
def test_a_signal_while_one_process_is_in_the_loop_and_another_is_not_is_no_failure(
    number: signal.Signals, start: Path, tmp_path: Path
) -> None:
    with Forked(make_job(start, tmp_path), fault="steps.begin:1:1:hang") as job:
        wait_for(lambda: "steps.begin hangs\n" in job.output(), job)
        time.sleep(0.5)  # the first process comes to its loop
        job.signal(number)
        codes = job.wait(10)

        # Before the loop SIGTERM ends a process as any program, and a launcher then all others.
        usual = {exit_code(number)} | ({-signal.SIGTERM} if number == signal.SIGTERM else set())
        assert set(codes) <= usual
        assert "Traceback" not in job.output()
        assert "rank" not in job.output()


@pytest.mark.jobs
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.faults), 2])
def test_ctrl_c_while_the_model_is_written_loses_no_step(
    processes: int, start: Path, tmp_path: Path
) -> None:
    """The second process waits for the one that writes."""
    config = small(start, "sft", output_dir=tmp_path / "whole", save_every="1h")
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
        assert " step 8/8 " not in job.output()  # no step is done again
    assert read_metrics(tmp_path / "run") == read_metrics(tmp_path / "whole")
    assert model(tmp_path / "run") == model(tmp_path / "whole")


def train_words(config: StepConfig, out: Path) -> list[str]:
    """`train.py` with the settings of a step 1."""
    words = ["train.py", "--step", "1", "--output-dir", str(out), "--deployment-type"]
    words += ["single_node", "--num-processes", "2"]
    for name, value in changed_settings(config).items():
        values = value if isinstance(value, list | tuple) else [value]
        words += [f"--sft.{name}", *("null" if each is None else str(each) for each in values)]
    return words


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
def test_the_real_commands_save_and_go_on(
    command: str, number: signal.Signals, start: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run" / "step1_sft"
    out.parent.mkdir()
    config = small(start, "sft", output_dir=out, max_steps=60)
    whole = tmp_path / "whole"
    single = command != "train.py"
    world_size = 1 if single else 2
    assert set(run_forked(replace(config, output_dir=whole), world_size=world_size)) == {0}
    config = replace(config, save_every=None)
    words = step_words(config, processes=None) if single else train_words(config, out.parent)

    with Command(*words) as job:
        wait_for_lines(out, 1, job)
        time.sleep(random.Random(number).uniform(0, 0.5))
        job.process.send_signal(number)
        assert job.wait() == exit_code(number), job.output()
        step = assert_prefix(out, whole)
        assert f"--resume continues after step {step}\n" in job.output()
    assert [line["step"] for line in read_metrics(out)][-1] == step

    with Command(*words, "--resume") as job:
        assert job.wait() == 0, job.output()
    assert read_metrics(out) == read_metrics(whole)
    assert model(out) == model(whole)
