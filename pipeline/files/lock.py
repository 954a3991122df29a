"""A lock that gives one job at a time exclusive use of a directory."""

import errno
import fcntl
import json
import logging
import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from pipeline.system.errors import ConfigError

logger = logging.getLogger(__name__)

UNSUPPORTED_ERRORS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}


class RunLock:
    """Context manager that gives this process exclusive use of the parent directory of `path`.

    The system releases the lock when the process exits, so there are no stale locks. The file names
    the holder and is removed at exit. Forked children do not inherit the lock.

    Raises:
        ConfigError: another process holds the lock, or the file can't be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1

    def __enter__(self) -> "RunLock":
        self._open()
        while not self._is_current():  # the previous holder removed the file
            os.close(self._file)
            self._open()
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
        with suppress(OSError):  # the lock is held even if the disk is full
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(holder).encode(), 0)
        return self

    def __exit__(self, *_error: object) -> None:
        if self._is_current():
            self.path.unlink(missing_ok=True)
        os.close(self._file)

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"{self.path} can't be created: {error.strerror}") from error
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in UNSUPPORTED_ERRORS:
                os.close(self._file)
                raise ConfigError(
                    f"{self.path.parent} is in use by {_describe_holder(self.path)}; wait for it,"
                    " stop it, or choose another directory"
                ) from None
            logger.warning(
                "%s can't be locked (%s): a second job could also use %s",
                self.path,
                error.strerror,
                self.path.parent,
            )

    def _is_current(self) -> bool:
        """Return whether the path still refers to the open file."""
        try:
            return os.path.samestat(os.fstat(self._file), self.path.stat())
        except FileNotFoundError:
            return False


def _describe_holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
