"""Compiling a C++ source at its first use, and keeping what came out.

There is no lock: processes that need the same library at once compile it each, and each puts a
whole one in its place by a rename. A process that is killed leaves a temporary file, which a later
one removes. A library ends in a digest of itself, so that one which a loss of power has cut off is
built again instead of loaded, and so is one that another user could have written
(pipeline/kernels/toolchain/cache.py).
"""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.kernels.toolchain.cache import CACHE, READABLE, cache_directory, is_trusted
from pipeline.kernels.toolchain.levels import level

COMPILERS = ("c++", "g++", "clang++")
"""Tried in this order where the variable CXX names none."""

FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
    "-pthread",
)

EXACT = ("-ffp-contract=off",)
"""Option by which each operation of a source is rounded as it is written."""

FUSED = ("-ffp-contract=fast",)
"""A product and a sum of vectors become a fused multiply-add, as `include/vectors.h` needs it."""

NUMBERS = {torch.float32: "Float32", torch.bfloat16: "BFloat16"}
"""What `include/vectors.h` calls dtypes of PyTorch."""

INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)

LEFTOVER = "rlhf-kernel-"
"""How the names of temporary files begin: the directory may be others' as well."""

COMPILE_SECONDS = 120
LEFTOVER_SECONDS = 24 * 3600
DIGEST_BYTES = hashlib.sha256().digest_size


class NotBuiltError(Exception):
    """A kernel can't be had on this machine; the message is a clause that says why."""


class CompilerError(NotBuiltError):
    """This compiler can't build it: another, or fewer flags, may do."""


@dataclass(frozen=True)
class Built:
    """A loaded library, and how it came about."""

    library: ctypes.CDLL

    compiler: str
    """The first line of what its `--version` prints."""

    path: Path | None
    """Where it is kept; None where the cache can't be written."""

    seconds: float | None
    """That compiling took; None where the library was there."""


def build(
    source: Path,
    defines: Mapping[str, str | int],
    flags: Sequence[str] = EXACT,
    *,
    optional: Sequence[str] = (),
) -> Built:
    """The library of a source with these macros, from the cache if it is there.

    By the first compiler that doesn't fail.

    Args:
        source: C++.
        defines: its macros.
        flags: besides FLAGS.
        optional: flags that the source can do without; old compilers don't know all.

    Raises:
        NotBuiltError: there is no compiler, or all fail, or the system can't load what they make.
    """
    words = [*FLAGS, *flags, *instruction_flags()]
    words += [f"-D{name}={value}" for name, value in defines.items()]
    failures: list[CompilerError] = []
    for compiler in compilers():
        for more in dict.fromkeys([tuple(optional), ()]):
            try:
                return _build(compiler, source, [*words, *more])
            except CompilerError as failure:
                failures.append(failure)
    raise failures[0]


def found(
    source: Path,
    defines: Mapping[str, str | int],
    flags: Sequence[str] = EXACT,
    *,
    optional: Sequence[str] = (),
) -> Built | NotBuiltError:
    """What `build` gives, or why it can't be had."""
    try:
        return build(source, defines, flags, optional=optional)
    except NotBuiltError as reason:
        return reason


def _build(compiler: Sequence[str], source: Path, words: Sequence[str]) -> Built:
    version = version_of(tuple(compiler))
    key = [version, platform.machine(), *compiler[1:], "", *words]
    identity = hashlib.sha256("\0".join([*key, *texts_of(source)]).encode()).hexdigest()
    kept = cache_directory() / f"{source.parent.name}-{source.stem}-{identity[:24]}.so"
    if is_trusted(kept) and is_whole(kept):
        return Built(load(kept), version, kept, None)
    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as private:
            made = _room_for(kept, Path(private))
            try:
                run_compiler([*compiler, *words, str(source), "-o", str(made)])
                seal(made)
                path = None if made.parent == Path(private) else _keep(made, kept)
                return Built(load(path or made), version, path, time.perf_counter() - started)
            finally:
                made.unlink(missing_ok=True)
    except OSError as error:  # no directory at all, or a full disk
        raise NotBuiltError(f"it can't be written to a disk: {error}") from error


def texts_of(source: Path) -> Collection[str]:
    """A source, and the project's own headers that it includes, by way of others as well."""
    texts: dict[Path, str] = {}
    files = [source]
    while files:
        file = files.pop().resolve()
        if file not in texts:
            texts[file] = file.read_text()
            files += [file.parent / name for name in INCLUDE.findall(texts[file])]
    return texts.values()


def _room_for(kept: Path, private: Path) -> Path:
    """An empty file beside where a library is kept, in `private` where nothing can be written."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_leftovers(kept.parent)
        handle, made = tempfile.mkstemp(dir=kept.parent, prefix=LEFTOVER, suffix=".tmp")
    except OSError:
        handle, made = tempfile.mkstemp(dir=private)
    os.close(handle)
    return Path(made)


def _keep(made: Path, kept: Path) -> Path | None:
    """Give a library its name; None where another user's file has it and may not be replaced."""
    try:
        made.chmod(READABLE)
        return made.replace(kept)
    except OSError:
        return None


def compilers() -> list[list[str]]:
    """The words that call each of the system's C++ compilers; one at least.

    Raises:
        NotBuiltError: there is none.
    """
    chosen = shlex.split(os.environ.get("CXX", ""))
    found = [
        [path, *words[1:]]
        for words in ([chosen] if chosen else [[name] for name in COMPILERS])
        if (path := shutil.which(words[0])) is not None
    ]
    if found:
        return found
    if chosen:
        raise NotBuiltError(f"the compiler that CXX names, {chosen[0]}, was not found")
    raise NotBuiltError(f"no C++ compiler was found ({', '.join(COMPILERS)}; CXX may name one)")


@functools.cache
def version_of(compiler: tuple[str, ...]) -> str:
    """What the compiler says of itself, in its first line; of the words that call it."""
    return run_compiler([*compiler, "--version"]).split("\n")[0]


def run_compiler(command: list[str]) -> str:
    """What the compiler prints.

    Raises:
        CompilerError: it fails, in its own words.
        NotBuiltError: it doesn't end.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=COMPILE_SECONDS
        )
    except OSError as error:
        raise CompilerError(f"the compiler {command[0]} can't be run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise NotBuiltError(f"the compiler {command[0]} doesn't end: {error}") from error
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines or ["nothing"]
        raise CompilerError(
            f"the compiler {command[0]} ended with code {done.returncode} and said: {errors[0]}"
        )
    return done.stdout


def instruction_flags() -> tuple[str, ...]:
    """What the compiler may use of this machine's processor: as much as PyTorch does.

    Raises:
        NotBuiltError: PyTorch rounds otherwise on it, having no fused multiply-add.
    """
    found = level()
    if found is None:
        capability = torch.backends.cpu.get_cpu_capability()
        raise NotBuiltError(
            f"the processor ({platform.machine()}, {capability}) is not one they are written for:"
            " x86 with AVX2 or AVX-512, or ARM with 64 bits"
        )
    return found.flags


def seal(library: Path) -> None:
    """Append the digest that `is_whole` looks for; a loader reads no further than its sections."""
    content = library.read_bytes()
    library.write_bytes(content + hashlib.sha256(content).digest())


def is_whole(library: Path) -> bool:
    """Whether a library is there, and all of it."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


def load(library: Path) -> ctypes.CDLL:
    """The library in this process.

    Raises:
        NotBuiltError: the system refuses it.
    """
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NotBuiltError(
            f"the system doesn't load {library} ({error}); set {CACHE} to a directory on a disk"
            " from which programs may be run"
        ) from error


def remove_leftovers(directory: Path) -> None:
    """Remove what builders left that were killed a day ago or earlier."""
    for leftover in directory.glob(f"{LEFTOVER}*.tmp"):
        try:
            if time.time() - leftover.stat().st_mtime > LEFTOVER_SECONDS:
                leftover.unlink()
        except OSError:
            continue  # another process was faster, or the file is not ours
