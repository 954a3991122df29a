"""A directory that each machine has for itself, as a setting names it."""

import os
import re
from pathlib import Path

from pipeline.errors import require

_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")


def own_disk(text: str, *, setting: str) -> Path:
    """The directory on this machine: `$TMPDIR` and `~` are this machine's.

    Raises:
        ConfigError: a variable is not set here, or the path depends on the working directory.
    """
    path = os.path.expandvars(Path(text).expanduser())
    left = _VARIABLE.search(path)
    require(
        left is None,
        f"{setting} {text}: {left[0] if left else text} is not set on this machine; set it on all"
        " machines, or name a directory without it",
    )
    check_own_disk(path, setting=setting)
    return Path(path)


def check_own_disk(text: str, *, setting: str) -> None:
    """Whether such a directory can be named so.

    Raises:
        ConfigError: it would depend on the working directory.
    """
    require(
        text.startswith(("/", "~", "$")),
        f"{setting} must be an absolute path, such as /nvme/checkpoints or $TMPDIR, because each"
        f" machine looks it up for itself; got {text!r}",
    )


def names_a_variable(text: str) -> bool:
    """Whether machines may take it for different directories."""
    return _VARIABLE.search(text) is not None
