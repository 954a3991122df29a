"""Joining the processes that torchrun started, under a watch that names the one at fault."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from pipeline.distributed import barrier, world_size
from pipeline.errors import JobFailed
from pipeline.signals import ended_by_ctrl_c
from pipeline.watch.process import watching

SECOND_WORD_SECONDS = 30


@contextmanager
def process_group(timeout_seconds: float = 1800) -> Iterator[None]:
    """Join the processes that torchrun started; does nothing where it started none.

    NCCL on GPUs, gloo on CPUs. A process that keeps the others waiting for `timeout_seconds` is
    named, and all are ended.

    Raises:
        JobFailed: a process failed, and the reason has been shown.
    """
    if "RANK" not in os.environ or dist.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # The watch has the first word, which names the process; this is for what it can't see.
    patience = timedelta(seconds=timeout_seconds + SECOND_WORD_SECONDS)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    with ended_by_ctrl_c():
        dist.init_process_group(backend, timeout=patience)
    try:
        with watching(timeout_seconds) if world_size() > 1 else nullcontext():
            yield
            barrier()  # gloo's threads abort where a process leaves while another still sends
    except JobFailed:
        raise  # a broken group can't be taken down in order
    except BaseException:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()
