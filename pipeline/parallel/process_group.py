"""Joins and leaves torchrun's process group, under a watchdog."""

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pipeline.parallel import launched
from pipeline.parallel.mesh import collective_timeout, current_mesh
from pipeline.system.errors import ConfigError, JobFailed
from pipeline.system.signals import default_sigint

Watchdog = Callable[[float], AbstractContextManager[None]]
"""Given a timeout in seconds, returns a context manager that watches the job's processes."""


@contextmanager
def process_group(watchdog: Watchdog, timeout_seconds: float = 1800) -> Iterator[None]:
    """Context manager that joins the processes started by torchrun, if it was used.

    The backend is NCCL on GPUs and gloo on CPUs. `watchdog`, normally `watch_processes`, stops all
    processes if one of them keeps the others waiting for `timeout_seconds`, and names it.

    Raises:
        JobFailed: a process failed, and the reason has been printed. On GPUs the process exits
            immediately instead, because its GPU may be waiting for the others.
        ConfigError: there are fewer GPUs than processes on this machine.
    """
    if "RANK" not in os.environ or dist.is_initialized():
        yield
        return
    gpu: torch.device | None = None
    if torch.cuda.is_available():
        index = gpu_index(launched.local_rank(), torch.cuda.device_count())
        gpu = torch.device("cuda", index)
        torch.cuda.set_device(gpu)
    backend = "gloo" if gpu is None else "nccl"
    with default_sigint():
        # Otherwise NCCL guesses the GPU, and a wrong guess fails only at the first collective.
        timeout = collective_timeout(timeout_seconds, launched.world_size())
        dist.init_process_group(backend, timeout=timeout, device_id=gpu)
    world = current_mesh().world
    try:
        with watchdog(timeout_seconds) if world.size > 1 else nullcontext():
            yield
            world.barrier()  # gloo aborts if a process exits during another's send
    except JobFailed as failed:
        if gpu is not None and isinstance(failed.code, int):
            # PyTorch has no public function that aborts all NCCL communicators.
            abort = getattr(distributed_c10d, "_abort_process_group", dist.destroy_process_group)
            hard_exit(failed.code, abort)
        raise  # a broken group can't be destroyed cleanly
    except BaseException:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def gpu_index(local_rank: int, visible: int) -> int:
    """Return the index of a process's GPU among the visible ones, or 0 if only one is visible.

    Schedulers that assign GPUs to tasks (`srun --gpus-per-task 1`) hide all other GPUs from a task.

    Raises:
        ConfigError: there are fewer GPUs than processes.
    """
    if visible == 1:
        return 0
    if local_rank < visible:
        return local_rank
    raise ConfigError(
        f"process {local_rank + 1} on this machine has no GPU: only {visible} are visible; start at"
        f" most {visible} processes per machine, or add GPUs to CUDA_VISIBLE_DEVICES"
    )


ABORT_SECONDS = 5.0
"""Seconds that a failed process spends trying to abort NCCL's collectives."""


def hard_exit(
    code: int, abort: Callable[[], object], *, seconds: float = ABORT_SECONDS
) -> NoReturn:
    """Exit this process immediately with `code`.

    An NCCL collective spins on the GPU until all processes have entered it, or until it is
    aborted. A normal exit would wait for it when freeing GPU memory; here the operating system
    frees it. `abort` is called in another thread; it has `seconds` seconds to abort collectives.
    """

    def try_to_abort() -> None:
        with suppress(Exception):
            abort()

    thread = threading.Thread(target=try_to_abort, name="abort", daemon=True)
    thread.start()
    thread.join(seconds)
    with suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)
