"""Modalities' packed files, X.pbin, read without executing their pickle.

bytes of the tokens u64 | bytes per token u32 (1, 2 or 4) | tokens, unsigned
| pickle of [(offset in bytes within the tokens, length in bytes), ...]
"""

import io
import mmap
import pickle
import struct
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pipeline.system.errors import DataError

_HEADER = struct.Struct("<QI")


def read_modalities(
    path: Path, content: mmap.mmap
) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]:
    """Tokens, offsets in bytes and lengths in tokens of a mapped X.pbin; `path` is for messages.

    Raises:
        DataError: the file is truncated, of another format, or its pickle is not a list of
            consecutive documents.
    """
    size, width = _HEADER.unpack_from(content) if len(content) >= _HEADER.size else (0, 0)
    if width not in (1, 2, 4) or size % width:
        raise DataError(f"{path} is not a packed file of Modalities; give another file")
    if len(content) <= _HEADER.size + size:
        raise DataError(f"{path} was not copied whole; copy it again")
    try:
        documents = _PlainUnpickler(io.BytesIO(content[_HEADER.size + size :])).load()
        offsets, sizes = np.array(documents, np.int64).reshape(-1, 2).T
    except Exception as error:  # a damaged pickle raises exceptions of many kinds
        raise DataError(f"{path} has an unreadable index ({error}); copy it again") from error
    ends = np.cumsum(sizes)
    if (sizes < 0).any() or (sizes % width).any() or not np.array_equal(offsets, ends - sizes):
        raise DataError(f"{path} has an index without consecutive documents; pack it again")
    if len(ends) and ends[-1] != size:
        raise DataError(f"{path} has an index that does not match its tokens; copy it again")
    ids = np.frombuffer(content, f"<u{width}", size // width, _HEADER.size)
    return ids, offsets, sizes // width


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of numbers, tuples and lists; a pickle that names a class or function fails."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which is not loaded")
