"""Programs that nobody has read, run where they can harm nothing.

A program runs in namespaces of its own (no network, no other processes, as nobody), in an empty
directory in memory, with all other mounts read-only, Landlock hiding all files but Python's, an
empty environment, and limits on memory, CPU time, processes, files and output. At the deadline the
kernel ends every process that it has started. `sandbox_child.py` is the inside.

What remains is what the kernel itself does not defend: the sandbox is as good as the machine's
kernel is up to date.
"""

import marshal
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rewards.workers import kill_tree

CHILD = Path(__file__).with_name("sandbox_child.py")
PROCESSES = 16
"""Processes and threads of a program at once."""

DISK_MB = 64
OUTPUT_BYTES = 1 << 20
"""Bytes of output that are kept; a program that writes more is ended."""

_PLACES = ("/mnt", "/srv", "/media", "/tmp")
_READABLE = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"),
    "/usr/share/zoneinfo",
)


class SandboxError(Exception):
    """The sandbox can't be built: nothing was run."""


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    seconds: float
    memory_mb: int
    isolated: bool = True
    """False runs it without namespaces and Landlock: limits and the deadline alone."""


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    code: int | None
    """Its exit code, 128 and the signal where one killed it; None where the deadline or the limit
    of output ended it."""

    output: bytes
    """What it wrote on standard output, at most `OUTPUT_BYTES`."""

    seconds: float


def run_python(files: Mapping[str, str], *, main: str, stdin: str, limits: Limits) -> Ended:
    """Run `main`, one of `files`, with the others beside it.

    Raises:
        SandboxError: the machine refuses what isolates the program.
    """
    began = time.monotonic()
    with ExitStack() as opened:
        read_end, write_end = os.pipe()
        status = opened.enter_context(os.fdopen(read_end, "rb", buffering=0))
        directory = _place() if limits.isolated else opened.enter_context(_temporary())
        job = opened.enter_context(_file(marshal.dumps(_job(files, main, limits, directory))))
        given = opened.enter_context(_file(stdin.encode(errors="replace")))
        try:
            process = subprocess.Popen(
                [_interpreter(), "-I", "-S", str(CHILD), str(job.fileno()), str(write_end)],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[job.fileno(), write_end],
                start_new_session=True,
                env={},
                cwd="/",
            )
        finally:
            os.close(write_end)
        try:
            output, finished = _read(process, began + limits.seconds)
        finally:
            _end(process)
        os.set_blocking(status.fileno(), False)
        if sentence := status.read():
            raise SandboxError(f"the sandbox can't be built ({sentence.decode(errors='replace')})")
    code = process.returncode if finished else None
    return Ended(code, output, time.monotonic() - began)


def _job(files: Mapping[str, str], main: str, limits: Limits, directory: str) -> dict[str, object]:
    place, prefix = directory, sys.base_prefix
    interpreter = _interpreter()
    python = prefix
    if limits.isolated:
        directory, python = f"{place}/work", f"{place}/python"
        interpreter = interpreter.replace(prefix, python, 1)
    return {
        "parent": os.getpid(),
        "isolated": limits.isolated,
        "place": place,
        "directory": directory,
        "prefix": prefix,
        "python": python,
        "files": dict(files),
        "command": [interpreter, "-I", "-S", main],
        "environment": {
            "LANG": "C.UTF-8",
            "HOME": directory,
            "TMPDIR": directory,
            "LD_LIBRARY_PATH": f"{python}/lib",
        },
        "readable": [python, *_READABLE],
        "memory_mb": limits.memory_mb,
        "cpu_seconds": int(limits.seconds) + 1,
        "disk_mb": DISK_MB,
        "processes": PROCESSES,
    }


def _interpreter() -> str:
    """Python without an environment of packages: the program has the standard library."""
    return os.path.realpath(sys.executable)


def _place() -> str:
    """An existing directory that Python is not in: an empty one is mounted over it."""
    for place in _PLACES:
        if Path(place).is_dir() and not sys.base_prefix.startswith(f"{place}/"):
            return place
    raise SandboxError(f"there is none of the directories {', '.join(_PLACES)}")


def _temporary() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="rlhf-sandbox-", ignore_cleanup_errors=True)


def _file(content: bytes) -> IO[bytes]:
    """A file without a name that holds the content, at its start."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(content)
    file.seek(0)
    return file


def _read(process: "subprocess.Popen[bytes]", deadline: float) -> tuple[bytes, bool]:
    """Its output, and whether it ended by itself before the deadline and within its output."""
    assert process.stdout is not None
    chunks: list[bytes] = []
    size = 0
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            if not chunk:
                break
            chunks.append(chunk)
            size += len(chunk)
            if size > OUTPUT_BYTES:
                return b"".join(chunks)[:OUTPUT_BYTES], False
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return b"".join(chunks), False
    return b"".join(chunks), True


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the program and all that it has started, which its outermost process then waits for."""
    if process.poll() is None:
        kill_tree(process.pid, itself=False)
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            process.wait()
    assert process.stdout is not None
    process.stdout.close()
