"""Writing under another name until what was written is verified."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import ConfigError, ModelError
from pipeline.files.durable import discard, rename_durably, settle
from pipeline.files.output import check_output


class UnverifiedError(ModelError):
    """What was written is not what it should be; it was removed."""


def check_out(out: Path) -> None:
    """Return if a directory can be made there; makes nothing.

    Raises:
        ConfigError: something already exists, or nothing can be written.
    """
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists():
        raise ConfigError(f"--out {out} already exists; remove it, or give another directory")
    check_output(out, option="--out")


@contextmanager
def written_aside(out: Path) -> Iterator[Path]:
    """A directory to write into, which gets the name `out` when the block ends without an error.

    Until then it is `<out>.partial`; an error removes it, and a process that was killed leaves it
    for the next call to remove.

    Raises:
        ConfigError: the disk is full, or it can't be written.
    """
    partial = out.with_name(f"{out.name}.partial")
    try:
        discard(partial)
        partial.mkdir(parents=True)
        yield partial
        settle(partial)
        rename_durably(partial, out)
    except OSError as error:
        discard(partial)
        reason = error.strerror or error
        raise ConfigError(f"--out {out} can't be written: {reason}") from error
    except BaseException:
        discard(partial)
        raise
