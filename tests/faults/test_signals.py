"""A scheduler's signal, whenever it comes: the state is saved, exit code 75, --resume goes on."""

import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config import StepConfig
from pipeline.run import changed_settings
from pipeline.signals import EXIT_REQUEUE
from tests.faults.jobs import (
    Command,
    Forked,
    assert_prefix,
    run_forked,
    small,
    step_words,
)
from tests.test_resume import metrics

STEPS = 30


def job_of(start: Path, out: Path) -> StepConfig:
    """Saves only because it is told to stop."""
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


def wait_for_lines(out: Path, count: int, job: Forked | Command) -> None:
    end = time.monotonic() + 60
    while lines(out) < count:
        assert time.monotonic() < end, job.said()
        time.sleep(0.005)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.faults)]
)
def test_a_signal_in_the_loop_saves_the_step_at_hand(
    number: signal.Signals, start: Path, long_reference: Path, tmp_path: Path
) -> None:
    config = job_of(start, tmp_path)

    with Forked(config) as job:
        wait_for_lines(tmp_path, 4, job)
        job.signal(number)
        codes = job.wait()
        said = job.said()

    assert codes == [EXIT_REQUEUE, EXIT_REQUEUE]
    step = assert_prefix(tmp_path, long_reference)
    assert step >= 3
    assert f"was told to stop after step {step} of {STEPS} and has saved its state" in said
    assert [line["step"] for line in metrics(tmp_path)][-1] == step  # not one step more
    assert run_forked(replace(config, resume=True)) == [0, 0]
    assert metrics(tmp_path) == metrics(long_reference)
    assert model(tmp_path) == model(long_reference)


def model(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


@pytest.mark.faults
def test_signals_at_random_instants_lose_nothing_that_the_loop_has_done(
    start: Path, long_reference: Path, tmp_path: Path
) -> None:
    """Before and after the loop a signal ends the process as it always does."""
    draw = random.Random(20)
    saves = runs = 0
    while saves < 8:
        runs += 1
        out = tmp_path / str(runs)
        config = job_of(start, out)
        while not (out / "result.json").exists():
            with Forked(config) as job:
                time.sleep(draw.uniform(0.5, 3))
                number = draw.choice([signal.SIGTERM, signal.SIGUSR1])
                job.signal(number)
                codes = job.wait()
            assert set(codes) <= {0, EXIT_REQUEUE, -number}
            step = assert_prefix(out, long_reference)
            if codes == [EXIT_REQUEUE, EXIT_REQUEUE]:
                saves += 1
                assert [line["step"] for line in metrics(out)][-1] == step
            config = replace(config, resume=True)

        assert metrics(out) == metrics(long_reference)
        assert model(out) == model(long_reference)


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
    ("command", "number"), [("train.py", signal.SIGTERM), ("step1_sft.train", signal.SIGUSR1)]
)
def test_the_real_commands_end_with_75_and_go_on(
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
        assert job.wait() == EXIT_REQUEUE, job.said()
        assert "--resume goes on" in job.said()
    step = assert_prefix(out, whole)
    assert [line["step"] for line in metrics(out)][-1] == step

    with Command(*words, "--resume") as job:
        assert job.wait() == 0, job.said()
    assert metrics(out) == metrics(whole)
    assert model(out) == model(whole)
