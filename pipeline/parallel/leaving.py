"""The end of a process whose GPU may wait for other processes for ever."""

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d

ABORT_SECONDS = 5.0
"""For which a process that failed tries to end in order what NCCL has begun."""


def leave(code: int, abort: Callable[[], object], *, seconds: float = ABORT_SECONDS) -> NoReturn:
    """End this process with `code`, whatever else of it still waits.

    A collective of NCCL spins on the GPU until all processes have come to it, or until it is
    aborted. Whoever waits for the GPU waits as long: the end of the interpreter too, which gives
    memory of the GPU back. So that is left to the system.

    Args:
        code: the exit code.
        abort: ends the collectives; it is given a thread of its own and `seconds`.
        seconds: until the process ends all the same.
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


def abort_collectives() -> None:
    """Take down all of NCCL's communicators without waiting for what they have begun."""
    abort = getattr(distributed_c10d, "_abort_process_group", dist.destroy_process_group)
    abort()
