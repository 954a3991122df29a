"""Machine code on the disk, by what it was made of."""

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.kernels.toolchain.cache import READABLE, is_trusted
from pipeline.kernels.toolchain.cpp import LEFTOVER

DAY = 24 * 3600
DIGEST_BYTES = hashlib.sha256().digest_size


class CubinCache:
    """A directory of cubins that processes share without a lock.

    Two that make the same one write the same bytes, each to a file of its own that then takes the
    name; a process that is killed leaves at most such a file, which goes after a day. Where the
    directory can't be written to nothing is kept. A file ends in a digest of what comes before,
    so that one which a loss of power has cut off, or a disk has changed, is made again; and so is
    one that another user could have written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, name: str, ingredients: Sequence[str]) -> Path:
        """Where the machine code lies that `ingredients` make: sources, options, versions."""
        content = hashlib.sha256()
        for each in ingredients:
            content.update(f"{len(each)}:{each}".encode())
        return self.directory / f"{name}-{content.hexdigest()[:16]}.cubin"

    def read(self, path: Path) -> bytes | None:
        """What `write` stored; None if nothing, or not all of it, or another user may have."""
        if not is_trusted(path):
            return None
        try:
            content = path.read_bytes()
        except OSError:
            return None
        image, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
        return image if hashlib.sha256(image).digest() == digest else None

    def remove(self, path: Path) -> None:
        """Have it made again the next time."""
        with contextlib.suppress(OSError):
            path.unlink()

    def write(self, path: Path, image: bytes) -> None:
        """Store an image, whole or not at all."""
        with contextlib.suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._remove_abandoned()
            handle, temporary = tempfile.mkstemp(dir=self.directory, prefix=LEFTOVER, suffix=".tmp")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(image + hashlib.sha256(image).digest())
                Path(temporary).chmod(READABLE)
                Path(temporary).replace(path)
            except OSError:
                Path(temporary).unlink(missing_ok=True)

    def _remove_abandoned(self) -> None:
        for path in self.directory.glob(f"{LEFTOVER}*.tmp"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < time.time() - DAY:
                    path.unlink()
