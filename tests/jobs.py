"""Multi-process jobs as a launcher starts them, with their exit codes and stderr."""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._C._distributed_c10d import TCPStore

from pipeline.cli.options import run_main
from pipeline.parallel.process_group import process_group
from pipeline.system.logs import configure_logging
from pipeline.watchdog.process import watch_processes
from tests.distributed import PROCESSES

_TIMEOUT = 60


@dataclass(frozen=True)
class Job:
    """The outcome of a job."""

    codes: list[int | None]
    """Exit codes by rank; -n where signal n ended the process."""

    errors: str
    """Standard error of all processes."""

    seconds: float
    """Seconds until the last process exited."""


def run_job(
    body: Callable[..., object],
    *args: object,
    world_size: int = 2,
    timeout_seconds: float = 30,
    agent: bool = True,
) -> Job:
    """Call `body(*args)` on every rank under `process_group`."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(world_size),
        "TORCHELASTIC_USE_AGENT_STORE": str(agent),
    }
    if not agent:
        del store  # frees the port
    with tempfile.TemporaryDirectory() as directory:
        errors = Path(directory) / "errors"
        errors.touch()
        ranks = [
            PROCESSES.Process(
                target=_run,
                args=(body, args, timeout_seconds, errors, {**environment, "RANK": str(rank)}),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        start = time.monotonic()
        for process in ranks:
            process.start()
        try:
            for process in ranks:
                process.join(timeout=max(0.0, start + _TIMEOUT - time.monotonic()))
            seconds = time.monotonic() - start
            codes = [process.exitcode for process in ranks]
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
        return Job(codes, errors.read_text(), seconds)


def _run(
    body: Callable[..., object],
    args: tuple[object, ...],
    timeout_seconds: float,
    errors: Path,
    environment: dict[str, str],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment)
    descriptor = os.open(errors, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)

    def main(_argv: object) -> None:
        with process_group(watch_processes, timeout_seconds):
            configure_logging(is_main=os.environ["RANK"] == "0")
            body(*args)

    run_main(main, [])
