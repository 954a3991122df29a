"""Processes that save checkpoints whose content depends on the step."""

import logging
import os
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch

from pipeline.engine.checkpoint import history
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.format import Fragment
from pipeline.engine.checkpoint.writer import CheckpointWriter
from pipeline.parallel.group import SELF_GROUP
from pipeline.system import faults
from tests.distributed import PROCESSES

NUMEL = 10_000

_barrier: Barrier
"""The barrier of the processes that `run_processes` started."""

POINTS = [
    "before_write",
    "mid_file",
    "after_file",
    "before_manifest",
    "before_rename",
    "after_rename",
    "before_latest",
    "during_prune",
]


def make_fragments(step: int, *, rank: int = 0, world_size: int = 1) -> list[Fragment]:
    """Return a weight sharded over the processes, and the random state of each, after `step`."""
    weight = torch.arange(NUMEL, dtype=torch.float32) + step
    start, stop = (NUMEL * index // world_size for index in (rank, rank + 1))
    state = torch.full((7,), step, dtype=torch.uint8)
    return [Fragment("actor/w", start, weight[start:stop]), Fragment(f"rng/{rank}", 0, state)]


def assert_has_step(checkpoint: Checkpoint | None, step: int) -> None:
    """Assert that the checkpoint is that of `step`."""
    assert checkpoint is not None
    weight = torch.empty(NUMEL)
    checkpoint.read("actor/w", 0, weight)
    assert torch.equal(weight, torch.arange(NUMEL) + step)
    for rank in range(checkpoint.world_size):
        state = torch.empty(7, dtype=torch.uint8)
        checkpoint.read(f"rng/{rank}", 0, state)
        assert state.tolist() == [step] * 7
    assert (checkpoint.step, checkpoint.state) == (step, {"step": step})


def make_writer(
    root: Path, *, rank: int = 0, world_size: int = 1, **options: Any
) -> CheckpointWriter:
    """Return a writer of the job `job`."""
    options = {"job": "job", "timeout_seconds": 20, **options}
    return CheckpointWriter(root, rank=rank, world_size=world_size, **options)


def save(root: Path, *steps: int, job: str = "job") -> None:
    """Save steps from one process."""
    writer = make_writer(root, job=job)
    for step in steps:
        writer.save(step, make_fragments(step), {"step": step})
    writer.wait()
    assert writer.failure is None


def save_steps(rank: int, world_size: int, root: Path, steps: list[int], job: str) -> None:
    """Save steps in each of several processes."""
    writer = make_writer(root, rank=rank, world_size=world_size, job=job)
    for step in steps:
        writer.save(step, make_fragments(step, rank=rank, world_size=world_size), {"step": step})
        writer.wait()
        _barrier.wait()  # as a training step does


def run_processes(
    body: Callable[..., None], *args: object, world_size: int, fault: str | None = None
) -> list[int]:
    """Call `body(rank, world_size, *args)` in processes with a fault; return their exit codes."""
    barrier = PROCESSES.Barrier(world_size)
    processes = [
        PROCESSES.Process(target=_run, args=(body, rank, args, fault, barrier), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + 60
    while any(process.exitcode is None for process in processes) and time.monotonic() < end:
        if any(process.exitcode for process in processes):
            break
        time.sleep(0.005)
    codes = []
    for process in processes:
        process.kill()
        process.join()
        codes.append(process.exitcode or 0)
        process.close()
    return codes


def _run(
    body: Callable[..., None],
    rank: int,
    args: tuple[object, ...],
    fault: str | None,
    barrier: Barrier,
) -> None:
    global _barrier  # noqa: PLW0603  # one job in a process
    _barrier = barrier
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    faults._faults = [tuple(word.split(":")) for word in (fault or "").split(",") if word]
    body(rank, barrier.parties, *args)


def list_names(root: Path) -> list[str]:
    """Return the sorted names in a directory."""
    return sorted(path.name for path in root.iterdir())


def newest(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the first candidate that verifies, and the warnings about those before it."""
    skipped: list[str] = []

    def collect(record: logging.LogRecord) -> bool:
        skipped.append(record.getMessage())
        return True

    history.logger.addFilter(collect)
    try:
        return history.find_newest_valid(root, SELF_GROUP), skipped
    finally:
        history.logger.removeFilter(collect)
