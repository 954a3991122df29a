"""Where compiled code is kept, and whose it must be before it is loaded.

Whoever can write a library, or rename one into its place, runs code as the user who loads it. So
code is loaded only if it, its directory and every directory above belong to this user or to root,
and nobody else can write there.
"""

import functools
import logging
import os
import stat
from pathlib import Path

CACHE = "RLHF_PIPELINE_CACHE"
"""Variable of the environment: the directory that keeps compiled kernels."""

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

READABLE = 0o644
"""Of what is kept: for whoever may enter the directory, and no one else can write it."""

NOWHERE = Path(os.devnull) / "kernels"
"""A place that can't be written: nothing is kept."""

logger = logging.getLogger(__name__)


def cache_directory() -> Path:
    """Where this user's compiled kernels are kept, whether or not it is there.

    The directory that RLHF_PIPELINE_CACHE names. In one that several users share, writable by all
    and sticky as /tmp is, each has a directory of his own. If others could change what lies there,
    the log says so and the user's own cache is used; NOWHERE if that is no better.
    """
    chosen = os.environ.get(CACHE)
    own = _own_cache()
    if not chosen:
        why = why_unsafe(own)
        if why is not None:
            _warn(f"compiled kernels are not kept, for {why}; {CACHE} may name another directory")
        return own if why is None else NOWHERE
    named = Path(chosen).absolute()
    directory = named / f"user-{os.geteuid()}" if _is_shared(named) else named
    why = why_unsafe(directory)
    if why is None:
        return directory
    instead = own if why_unsafe(own) is None else NOWHERE
    where = f"are kept in {own}" if instead is own else "are not kept"
    _warn(f"compiled kernels {where}, and not in {named} as {CACHE} says, for {why}")
    return instead


def is_trusted(file: Path) -> bool:
    """Whether a file is there, and nobody but this user and root can have written it."""
    try:
        status = file.lstat()
    except OSError:
        return False
    if not stat.S_ISREG(status.st_mode) or status.st_mode & OTHERS_WRITE:
        return False
    return _is_trusted_user(status.st_uid) and why_unsafe(file.parent) is None


def why_unsafe(directory: Path) -> str | None:
    """Why code in a directory might be another user's, as a clause; None if it can't be.

    What is not there yet is safe if it can be made safely. Of what lies in the user's home only the
    way down from there is asked.
    """
    for path in dict.fromkeys([directory.absolute(), directory.resolve()]):
        way = [path, *path.parents]
        if (home := _home()) in way:
            way = way[: way.index(home) + 1]
        for each in way:
            why = _why_writable(each, leaf=each == path)
            if why is not None:
                return why
    return None


def _why_writable(path: Path, *, leaf: bool) -> str | None:
    """Who else can put something into this one directory."""
    try:
        status = path.lstat()
    except OSError:  # what can't be seen can't be loaded from either
        return None
    if not _is_trusted_user(status.st_uid):
        return f"{path} belongs to another user (uid {status.st_uid})"
    if stat.S_ISLNK(status.st_mode):
        return None  # what it leads to is asked as well
    is_sticky = bool(status.st_mode & stat.S_ISVTX) and not leaf  # nobody can rename another's
    own_group = not leaf and status.st_gid in (os.getegid(), 0)  # as umask 002 makes them
    writable = status.st_mode & (stat.S_IWOTH if own_group else OTHERS_WRITE)
    if writable and not is_sticky:
        return f"{path} can be written by other users (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def _is_shared(directory: Path) -> bool:
    """Whether all may write there, each his own files."""
    try:
        mode = directory.stat().st_mode
    except OSError:
        return False
    return bool(mode & stat.S_ISVTX) and bool(mode & OTHERS_WRITE)


def _is_trusted_user(uid: int) -> bool:
    return uid in (0, os.geteuid())


def _own_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    directory = Path(base).absolute() if base else _home() / ".cache"
    return directory / "rlhf-pipeline" / "kernels"


def _home() -> Path:
    """The user's directory; where there is none, a place that can't be written."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.devnull)


@functools.cache
def _warn(sentence: str) -> None:
    """Once in each process."""
    logger.warning("%s", sentence)
