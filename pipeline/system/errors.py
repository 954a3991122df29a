"""Errors that a user can fix: one sentence that names the problem and the fix."""

import difflib
import errno
import os
from collections.abc import Iterable

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_OUT_OF_MEMORY = 79
"""Exit code if memory ran out, above those of sysexits.h; `train.py` then halves the micro-batch of
the step, and exits with this code if that doesn't help."""

EXIT_DIVERGED = 80
"""Exit code if loss, gradients or weights stayed infinite or NaN; the best weights are kept."""

EXIT_DISK_FULL = 81
"""Exit code of a run that could not write its results; it can resume from its last checkpoint."""


class UserError(Exception):
    """An error that users can fix; commands print it without a traceback and exit with code 2."""


class ConfigError(UserError, ValueError):
    """A setting or option is invalid, or contradicts another one."""


class DataError(UserError, ValueError):
    """A file, data set or row can't be used."""


class ModelError(UserError, ValueError):
    """A model or tokenizer can't be used."""


class CheckpointError(UserError):
    """A checkpoint can't be read, or differs from what was saved."""


class OffloadError(UserError):
    """A disk for offloaded tensors failed."""


class KernelError(UserError):
    """A kernel that the settings require is not available on this machine."""


class DivergedError(RuntimeError):
    """Training diverged permanently; a command reports it in one sentence and exits with code 80.

    All processes raise it at the same point, since they detect it with an all-reduce.
    """


class JobFailed(SystemExit):
    """A job of several processes failed, and the reason was printed."""


class JobStopped(SystemExit):
    """The training processes of a job agreed to stop."""


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command, and of all processes of a job, after this error."""
    if isinstance(error, UserError):
        return EXIT_USER_ERROR
    if isinstance(error, DivergedError):
        return EXIT_DIVERGED
    if is_disk_full(error):
        return EXIT_DISK_FULL
    return EXIT_OUT_OF_MEMORY if is_out_of_memory(error) else EXIT_FAILED


MEMORY_ERRORS = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")
"""Parts of the messages of PyTorch's CPU allocator, of CUDA and NCCL, and of cuBLAS and cuDNN."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the device or the machine is out of memory."""
    type_name = type(error).__name__  # avoids importing torch
    message = str(error) if isinstance(error, RuntimeError) else ""
    is_library_error = any(part in message for part in MEMORY_ERRORS)
    return isinstance(error, MemoryError) or type_name == "OutOfMemoryError" or is_library_error


def is_disk_full(error: BaseException) -> bool:
    """Return whether the disk or the user's quota is full."""
    has_errno = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return has_errno or os.strerror(errno.ENOSPC) in str(error)  # safetensors raises its own error


MAX_REASON_LENGTH = 200
"""Maximum number of characters of a library's message within an error message."""


def one_line(error: Exception) -> str:
    """Return an error's first paragraph on one line, with its type if it is a KeyError or empty."""
    line = " ".join(str(error).split("\n\n")[0].split())
    if isinstance(error, KeyError) or not line:
        line = f"{type(error).__name__} {line}".strip()
    return line if len(line) <= MAX_REASON_LENGTH else line[:MAX_REASON_LENGTH].rstrip() + " ..."


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: a similar name, or all known names."""
    by_lower = {known_name.lower(): known_name for known_name in known}
    names = name.replace(",", " ").lower().split()
    if len(names) > 1 and by_lower.keys() >= set(names):
        return f"pass separate values: {' '.join(by_lower[part] for part in names)}"
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1)
    if matches:
        return f"did you mean {by_lower[matches[0]]}?"
    return f"available: {', '.join(sorted(by_lower.values())) or 'none'}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, such as `1 row` or `2,000 rows`."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def require(condition: bool, message: str) -> None:  # noqa: FBT001
    """Raise `ConfigError(message)` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)
