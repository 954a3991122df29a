"""Joining the processes that torchrun started, under a watchdog that names the one at fault."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from pipeline.errors import JobFailed
from pipeline.parallel import launched
from pipeline.parallel.mesh import current_mesh, patience
from pipeline.signals import ended_by_ctrl_c

Watchdog = Callable[[float], AbstractContextManager[None]]
"""Given the timeout in seconds, watches the processes of the job while it is entered."""


@contextmanager
def process_group(watchdog: Watchdog, timeout_seconds: float = 1800) -> Iterator[None]:
    """Join the processes that torchrun started; does nothing where it started none.

    NCCL on GPUs, gloo on CPUs. A process that keeps the others waiting for `timeout_seconds` is
    named, and all are ended: `watchdog` is `pipeline.watchdog.process.watching`.

    Raises:
        JobFailed: a process failed, and the reason has been shown.
    """
    if "RANK" not in os.environ or dist.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(launched.local_rank())
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    with ended_by_ctrl_c():
        dist.init_process_group(backend, timeout=patience(timeout_seconds))
    world = current_mesh().world
    try:
        with watchdog(timeout_seconds) if world.size > 1 else nullcontext():
            yield
            world.barrier()  # gloo's threads abort where a process leaves while another still sends
    except JobFailed:
        raise  # a broken group can't be taken down in order
    except BaseException:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()
