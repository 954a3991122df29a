"""One job at a time in a directory."""

import errno
import fcntl
import json
import logging
import os
import socket
import weakref
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from pipeline.system.errors import ConfigError

logger = logging.getLogger(__name__)

NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}


class RunLock:
    """Context manager: this process alone has the directory that `path` lies in.

    The system holds the lock and drops it with the process, however that ends, so there are no
    stale ones; the file only says whose it is, and is removed at the end. Children that are forked
    do not inherit it.

    Raises:
        ConfigError: another process has it, or the file can't be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1

    def __enter__(self) -> "RunLock":
        self._open()
        while not self._is_ours():  # the holder before has removed it meanwhile
            self._close()
            self._open()
        _close_in_children(self)
        self._sign()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._file >= 0 and self._is_ours():
            self.path.unlink(missing_ok=True)
        self._close()

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"{self.path} can't be made: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._close()
            raise ConfigError(
                f"{self.path.parent} is in use by {_holder(self.path)}; wait for it, stop it, or"
                " choose another directory"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                self._close()
                raise ConfigError(f"{self.path} can't be locked: {error.strerror}") from error
            logger.warning(
                "%s can't be locked (%s): nothing keeps a second job out of %s",
                self.path,
                error.strerror,
                self.path.parent,
            )

    def _is_ours(self) -> bool:
        """Whether the file we have is still the one under that name."""
        try:
            return os.path.samestat(os.fstat(self._file), self.path.stat())
        except FileNotFoundError:
            return False

    def _sign(self) -> None:
        me = {"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}
        with suppress(OSError):  # a full disk; the lock is held all the same
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(me).encode(), 0)

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _close_in_children(lock: RunLock) -> None:
    """A forked child that outlives the holder, such as a loader of data, must not keep the lock."""
    reference = weakref.ref(lock)

    def close() -> None:
        inherited = reference()
        if inherited is not None:
            inherited._close()  # noqa: SLF001  # of this module

    os.register_at_fork(after_in_child=close)


def _holder(path: Path) -> str:
    try:
        other = json.loads(path.read_text(encoding="utf-8"))
        return f"process {other['pid']} on {other['host']} since {other['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
