"""OpenMP threads: how many there are, and how they wait for each other."""

import os
import sys
from collections.abc import MutableMapping

import psutil

from pipeline.system.errors import ConfigError

THREADS_VARIABLE = "RLHF_THREADS"
"""Environment variable: threads per process, used if the setting `threads` is null."""

SPIN_VARIABLES = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
"""Environment variables that determine how OpenMP threads wait."""

BUSY_PERCENT = 25.0
"""CPU usage in percent above which other programs are assumed to need the cores."""


def set_compute_threads(number: int | None) -> None:
    """Set the number of threads; None uses RLHF_THREADS, or else PyTorch's default.

    Raises:
        ConfigError: the number is not positive.
    """
    text = os.environ.get(THREADS_VARIABLE) or None if number is None else str(number)
    if text is not None and (not text.isdecimal() or int(text) == 0):
        name = THREADS_VARIABLE if number is None else "threads"
        raise ConfigError(f"{name} must be a positive integer, got {text!r}")
    if "torch" not in sys.modules:
        shorten_spinning(os.environ)
        os.environ.update({} if text is None else {"OMP_NUM_THREADS": text})
    elif text is not None:
        sys.modules["torch"].set_num_threads(int(text))


def shorten_spinning(environment: MutableMapping[str, str]) -> None:
    """Shorten the time that GNU OpenMP's threads spin while waiting for each other.

    The default, several milliseconds, makes passes of small models many times slower if other
    programs use the cores. With a short spin the threads are still awake for the next operator; if
    other programs are busy now, threads sleep immediately. The user's own settings take precedence.
    """
    if not SPIN_VARIABLES.intersection(environment):
        busy = psutil.cpu_percent(interval=0.2)
        environment["GOMP_SPINCOUNT"] = "0" if busy > BUSY_PERCENT else "10000"


def cores_per_process(processes: int) -> int:
    """Return the number of cores (at least 1) for each of `processes` processes on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // processes)
