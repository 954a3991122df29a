"""Files that are compressed, as bytes: gzip and Zstandard."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pipeline.errors import DataError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

READ_BYTES = 128 * 2**10


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The content of a `.gz` or `.zst` file.

    Raises:
        DataError: here or while it is read: the file is damaged or cut off.
    """
    kind = "gzip" if path.suffix == ".gz" else "Zstandard"
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as content:
                yield io.BufferedReader(content, READ_BYTES)
        else:
            with path.open("rb") as file, io.BufferedReader(_Unpacked(file), READ_BYTES) as content:
                yield content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole {kind} file: {error}; copy it again") from error


def check_readable(path: Path) -> None:
    """Refuse a `.zst` file where the package that reads it is missing.

    Raises:
        DataError: it is.
    """
    if path.suffix != ".zst":
        return
    try:
        import_module("zstandard")
    except ImportError:
        raise DataError(
            f"{path} needs the package zstandard, which is not here: pip install zstandard"
        ) from None


class _Unpacked(io.RawIOBase):
    """The frames of a Zstandard file, one after the other.

    The package's own reader takes the end of a file that was cut off for the end of the data.
    """

    def __init__(self, file: BinaryIO) -> None:
        zstandard: Any = import_module("zstandard")
        self._file = file
        self._error = zstandard.ZstdError
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame = self._new_frame()
        self._begun = False
        self._waiting = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        view = memoryview(buffer).cast("B")
        while not self._waiting:
            packed = self._frame.unused_data if self._frame.eof else b""
            packed = packed or self._file.read(READ_BYTES)
            if not packed:
                if self._begun and not self._frame.eof:
                    raise EOFError("it ends within a frame")
                return 0
            if self._frame.eof:
                self._frame = self._new_frame()
            self._begun = True
            try:
                self._waiting = self._frame.decompress(packed)
            except self._error as error:
                raise OSError(str(error)) from error
        count = min(len(view), len(self._waiting))
        view[:count] = self._waiting[:count]
        self._waiting = self._waiting[count:]
        return count
