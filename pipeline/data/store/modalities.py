"""Modalities' packed files: X.pbin.

    bytes of the tokens u64 | bytes of a token u32 (1, 2 or 4) | tokens, unsigned
    | pickle of [(begin in bytes among the tokens, length in bytes), ...]

The pickle is not loaded: it is read opcode by opcode, and of all opcodes only those are known that
make a list of pairs of whole numbers. Nothing that it says is executed.
"""

import pickletools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import DataError

_HEADER = struct.Struct("<QI")

_OPCODES = ((b"](\x94\x86ae.", 0), (b"K\x8aq\x80", 1), (b"M", 2), (b"Jr", 4), (b"\x95", 8))
ARGUMENT_BYTES = {bytes([code]): size for codes, size in _OPCODES for code in codes}
"""By opcode: EMPTY_LIST, MARK, MEMOIZE, TUPLE2, APPEND, APPENDS, STOP; BININT1, LONG1 (whose
number follows), BINPUT, PROTO; BININT2; BININT, LONG_BINPUT; FRAME."""


def read_modalities(path: Path) -> Iterator[NDArray[Any]]:
    """The documents of a .pbin file, views of the file: [tokens] each.

    Raises:
        DataError: the file is missing, cut off or of another format, or its pickle has an opcode
            that a list of pairs does not need.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_HEADER.size)
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from error
    length, width = _HEADER.unpack(head) if len(head) == _HEADER.size else (0, 0)
    if width not in (1, 2, 4) or length % width:
        raise DataError(f"{path} is not a packed file of Modalities'")
    begin = _HEADER.size + length
    if size <= begin:
        raise DataError(f"{path} ends before its index: it was not copied whole; copy it again")
    whole = np.memmap(path, np.uint8, "r")
    tokens = np.frombuffer(whole, f"<u{width}", length // width, _HEADER.size)
    for start, count in read_pairs(path, whole[begin:].data):
        if start % width or count % width or not 0 <= start <= start + count <= length:
            raise DataError(f"{path} is damaged: its index names bytes that it does not have")
        yield tokens[start // width : (start + count) // width]


def read_pairs(path: Path, pickle: memoryview) -> Iterator[tuple[int, int]]:
    """The pairs in a pickled list of pairs of whole numbers; `path` is for messages.

    Raises:
        DataError: it is something else.
    """
    damaged = DataError(f"{path} has a damaged index; copy it again")
    numbers: list[int] = []
    position = 0
    while position < len(pickle):
        code = bytes(pickle[position : position + 1])
        if code not in ARGUMENT_BYTES:
            names = {each.code: each.name for each in pickletools.opcodes}
            name = names.get(chr(code[0]), f"0x{code.hex()}")
            raise DataError(
                f"{path} has the opcode {name} in its index, which a list of pairs does not need;"
                " it is not read"
            )
        start = position + 1
        position = start + ARGUMENT_BYTES[code]
        if code == b"\x8a":
            start, position = position, position + pickle[start] if position <= len(pickle) else 0
        if position > len(pickle) or position == 0:
            break
        if code in b"KMJ\x8a":
            is_signed = code in b"J\x8a"
            numbers.append(int.from_bytes(pickle[start:position], "little", signed=is_signed))
        elif code == b"\x86":
            if len(numbers) != 2:
                raise damaged
            yield numbers[0], numbers[1]
            numbers.clear()
        elif code == b".":
            if numbers:
                raise damaged
            return
    raise damaged
