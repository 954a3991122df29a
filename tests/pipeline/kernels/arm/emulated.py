"""Kernels of the CPU as a 64-bit ARM processor computes them, by a cross compiler and qemu.

Debian's packages g++-aarch64-linux-gnu and qemu-user have both.
"""

import ctypes
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any, cast

from pipeline.kernels.toolchain.cpp import FLAGS, Built

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
CALL = Path(__file__).with_name("call.cpp")
NUMBER, STRUCTURE = range(2)

ALLOCATED = ctypes.CDLL(None).malloc_usable_size
ALLOCATED.argtypes, ALLOCATED.restype = [ctypes.c_void_p], ctypes.c_size_t
"""Bytes behind an address that malloc gave, as tensors and arrays begin with."""


def is_there() -> bool:
    """Whether there are both a compiler and an emulator."""
    return which(COMPILER) is not None and which(EMULATOR) is not None


@dataclass(frozen=True)
class Emulated:
    """A library whose functions run in a process of an emulated processor, one thread each.

    Pointers in their structures must be the beginnings of memory that malloc gave.
    """

    source: Path
    words: Sequence[str]
    """For the compiler: flags and macros."""

    directory: Path

    def __getattr__(self, name: str) -> "Function":
        return Function(self, name)


class Function:
    """One of them, called as `ctypes` would."""

    def __init__(self, library: Emulated, name: str) -> None:
        self._library, self._name = library, name
        self.restype: Any = None

    def __call__(self, *args: Any) -> int:
        directory = self._library.directory
        buffers: dict[int, bytes] = {}
        packed = b"".join(_packed(each, buffers) for each in args)
        contents = b"".join(_number(len(each)) + each for each in buffers.values())
        request, answer = directory / "request", directory / "answer"
        request.write_bytes(_number(len(buffers)) + contents + _number(len(args)) + packed)
        _run([EMULATOR, str(self._program()), str(request), str(answer)])
        got = answer.read_bytes()
        at = 8
        for address, before in buffers.items():
            ctypes.memmove(address, got[at : at + len(before)], len(before))
            at += len(before)
        return struct.unpack("q", got[:8])[0]

    def _program(self) -> Path:
        library = self._library
        program = library.directory / f"{library.source.parent.name}-{self._name}"
        if not program.exists():
            flags = [each for each in FLAGS if each not in ("-fPIC", "-shared")]
            words = [*flags, *library.words, f"-DFUNCTION={self._name}", "-static"]
            _run([COMPILER, *words, str(library.source), str(CALL), "-o", str(program)])
        return program


def emulated(
    source: Path, defines: Mapping[str, str | int], flags: Sequence[str], directory: Path
) -> Built:
    """What `build` gives, computed by the emulator."""
    words = [*flags, *(f"-D{name}={value}" for name, value in defines.items())]
    directory.mkdir(exist_ok=True)
    library = cast("ctypes.CDLL", Emulated(source, words, directory))
    return Built(library, COMPILER, None, None)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _number(number: int) -> bytes:
    return struct.pack("q", number)


def _packed(argument: Any, buffers: dict[int, bytes]) -> bytes:
    """An argument as `call.cpp` reads it; the memory that it points to is added to `buffers`."""
    structure = getattr(argument, "_obj", None)
    if structure is None:  # what is null or points to a function is left out: one thread does all
        is_number = isinstance(argument, (ctypes.c_int32, ctypes.c_int64))
        return _number(NUMBER) + _number(argument.value if is_number else 0)
    content = bytes(structure)
    places: list[bytes] = []
    for place in _pointers(structure):
        (address,) = struct.unpack_from("Q", content, place)
        if address:
            size = ALLOCATED(address)
            buffers.setdefault(address, ctypes.string_at(address, size))
            places += [_number(place), _number(list(buffers).index(address))]
    head = _number(STRUCTURE) + _number(len(content)) + content
    return head + _number(len(places) // 2) + b"".join(places)


def _pointers(structure: ctypes.Structure, start: int = 0) -> Iterator[int]:
    """Places of the pointers in a structure and in those that it holds."""
    for name, kind, *_ in type(structure)._fields_:
        place = start + getattr(type(structure), name).offset
        if kind is ctypes.c_void_p:
            yield place
        elif issubclass(kind, ctypes.Structure):
            yield from _pointers(getattr(structure, name), place)
