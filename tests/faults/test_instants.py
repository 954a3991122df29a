"""Thirty random instants of the three steps, at which Ctrl-C, SIGTERM or SIGKILL ends the job.

With `--resume` each ends in the undisturbed run's weights, moments and metrics, bit for bit. Ctrl-C
and SIGTERM lose nothing that was done; SIGKILL what came after the last save.
`--log-cli-level=INFO` shows a row for each instant.
"""

import logging
import random
import shutil
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pipeline.config import StepConfig
from pipeline.signals import EXIT_INTERRUPTED, EXIT_REQUEUE
from tests.faults.jobs import Forked, assert_prefix, assert_same_end, small
from tests.test_resume import metrics

logger = logging.getLogger(__name__)

INSTANTS = 10
"""Of each step."""

PATIENCE_SECONDS = 600
"""For a job to end: the machine may be busy."""

SAVE_EVERY = 3
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
CODES = {
    signal.SIGINT: EXIT_INTERRUPTED,
    signal.SIGTERM: EXIT_REQUEUE,
    signal.SIGKILL: -signal.SIGKILL,
}


@dataclass
class Row:
    """What happened at one instant."""

    seconds: float
    number: signal.Signals
    codes: list[int]
    """Exit codes of the processes."""

    begun: bool
    """Whether the step had its directory: before that Python itself ends the process."""

    done: int
    """Steps that were done just before."""

    kept: int
    """Steps after which the new start went on."""


def steps_done(out: Path) -> int:
    """By the metrics so far."""
    path = out / "metrics.jsonl"
    return max((line["step"] for line in metrics(out)), default=0) if path.exists() else 0


def signalled(
    config: StepConfig, number: signal.Signals, seconds: float, processes: int
) -> Row | None:
    """Start the job and signal all its processes at an instant; None if it had ended by then."""
    out = config.output_dir
    with Forked(config, world_size=processes) as job:
        time.sleep(seconds)
        begun, done = (out / "metrics.jsonl").exists(), steps_done(out)
        if not all(process.is_alive() for process in job.processes):
            return None
        job.signal(number)
        codes = job.wait(PATIENCE_SECONDS)
    if codes == [0] * processes:
        return None
    return Row(seconds, number, codes, begun, done, 0)


def finish(config: StepConfig, processes: int) -> None:
    """Run it to its end."""
    with Forked(config, world_size=processes) as job:
        assert job.wait(PATIENCE_SECONDS) == [0] * processes, job.output()


def assert_kept(row: Row, steps: int) -> None:
    """Nothing is lost but what may be."""
    assert row.done <= steps
    if row.number is signal.SIGKILL:
        last_save = row.done - row.done % SAVE_EVERY
        assert row.kept >= max(0, last_save - SAVE_EVERY), row  # that save may have been under way
    else:
        assert row.kept >= row.done, row
    usual = {CODES[row.number]}
    if row.number is signal.SIGTERM and (row.kept in (0, steps) or not row.begun):
        usual.add(-signal.SIGTERM)  # where there is nothing to save, several processes just end
    if row.begun:
        assert set(row.codes) <= usual, row


@pytest.mark.faults
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("step", "steps", "processes"), [("sft", 16, 2), ("reward", 16, 2), ("ppo", 6, 1)]
)
def test_a_job_ended_at_any_instant_goes_on_to_the_same_bits(
    step: str, steps: int, processes: int, start: Path, tmp_path: Path
) -> None:
    reference = tmp_path / "reference"
    whole = small(start, step, output_dir=reference, max_steps=steps)
    finish(replace(whole, max_steps=1), processes)
    began = time.monotonic()
    finish(whole, processes)
    total = time.monotonic() - began
    draw = random.Random(step)
    rows: list[Row] = []

    while len(rows) < INSTANTS:
        out = tmp_path / f"run {len(rows)}"
        config = replace(whole, output_dir=out, save_every=SAVE_EVERY)
        number = SIGNALS[len(rows) % len(SIGNALS)]
        row = signalled(config, number, draw.uniform(0.1, total), processes)
        if row is None:
            shutil.rmtree(out, ignore_errors=True)
            continue
        row.kept = assert_prefix(out, reference)
        assert_kept(row, steps)
        rows.append(row)
        finish(replace(config, resume=True), processes)
        assert_same_end(out, reference, step=steps)
        logger.info(
            "| %s, %d processes | %.1f of %.1f s | %s | %d of %d | %s | %d | %d | yes |",
            *(step, processes, row.seconds, total, row.number.name, row.done, steps),
            *(row.codes, row.kept, max(0, row.done - row.kept)),
        )
