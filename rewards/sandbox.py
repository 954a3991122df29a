"""Rewards from programs: the tests of a row, run in a sandbox.

A program runs in separate namespaces (no network, no other processes, as nobody), in an empty
directory in memory, with all other mounts read-only, Landlock hiding all files except Python's, an
empty environment, and limits on memory, CPU time, processes, files and output. At the deadline the
kernel kills every process that the program has started. `sandbox_child.py` runs inside. Kernel
vulnerabilities remain, so keep the machine's kernel up to date.

A program that fails, hangs or runs out of memory is wrong: its reward is 0. Only a sandbox that
can't be built, and tests that can't be read, are failures.
"""

import ast
import marshal
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import parse_literal
from pipeline.system.errors import ConfigError
from rewards.config import RewardConfig
from rewards.contract import Episode, Scorer, one_by_one
from rewards.workers import kill_tree

CHILD = Path(__file__).with_name("sandbox_child.py")
PROCESSES = 16
"""Maximum processes and threads of a program."""

DISK_MB = 64
"""Size limit of a program's directory, and of any file, including its output."""

OUTPUT_BYTES = 1 << 20
"""Maximum bytes of output; a program that writes more is wrong."""

_PLACES = ("/mnt", "/srv", "/media", "/tmp")
_READABLE = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"),
    "/usr/share/zoneinfo",
)


class SandboxError(Exception):
    """The sandbox can't be built, and nothing was run."""


@dataclass(frozen=True)
class Limits:
    """Resource limits of a program."""

    seconds: float
    memory_mb: int
    isolated: bool = True
    """Whether to use namespaces and Landlock, in addition to limits and the deadline."""


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    code: int | None
    """Exit code, or 128 plus the signal that killed it; None if it exceeded the deadline or
    wrote too much."""

    output: bytes
    """Standard output, at most `OUTPUT_BYTES`."""

    seconds: float


def run_python(files: Mapping[str, str], *, main: str, stdin: str, limits: Limits) -> Ended:
    """Run `main`, one of `files`, in a directory with the others.

    Raises:
        SandboxError: the machine doesn't support the isolation.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        directory = _place() if limits.isolated else stack.enter_context(_temporary())
        job, given, output, status = (
            stack.enter_context(tempfile.TemporaryFile()) for _ in range(4)
        )
        job.write(marshal.dumps(_job(files, main, limits, directory)))
        given.write(stdin.encode(errors="replace"))
        for file in (job, given):
            file.seek(0)
        process = subprocess.Popen(
            [_interpreter(), "-I", "-S", str(CHILD), str(job.fileno()), str(status.fileno())],
            stdin=given,
            stdout=output,
            stderr=subprocess.DEVNULL,
            pass_fds=[job.fileno(), status.fileno()],
            start_new_session=True,
            env={},
            cwd="/",
        )
        try:
            code = process.wait(max(0.0, began + limits.seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        status.seek(0)
        if sentence := status.read():
            raise SandboxError(f"the sandbox can't be built ({sentence.decode(errors='replace')})")
        output.seek(0)
        text = output.read(OUTPUT_BYTES + 1)
    code = code if len(text) <= OUTPUT_BYTES else None
    return Ended(code, text[:OUTPUT_BYTES], time.monotonic() - began)


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
    """Python without installed packages: programs have only the standard library."""
    return os.path.realpath(sys.executable)


def _place() -> str:
    """An existing directory outside Python's, over which an empty one is mounted."""
    for place in _PLACES:
        if Path(place).is_dir() and not sys.base_prefix.startswith(f"{place}/"):
            return place
    raise SandboxError(f"the sandbox needs one of {', '.join(_PLACES)}, without Python in it")


def _temporary() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="rlhf-sandbox-", ignore_cleanup_errors=True)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the program and its descendants; its outermost process then waits for them."""
    if process.poll() is None:
        kill_tree(process.pid, itself=False)
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            process.wait()


_FENCED = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)

_WITH_TESTS = """\
import os, sys
def run():
    token = sys.stdin.readline().strip()
    names = {"__name__": "solution"}
    for file in ("solution.py", "tests.py"):
        with open(file, encoding="utf-8") as text:
            exec(compile(text.read(), file, "exec"), names)
    sys.stdout.flush()
    os.write(1, token.encode())
run()
"""
"""Runs a solution and its tests; a program that exits before the tests never writes the token."""


def code_scorer(config: RewardConfig) -> Scorer:
    """The fraction of a row's tests that the program in the response passes, from 0 to 1.

    The program is the last fenced block of the response, else the whole response. The tests of a
    row are Python code (or a list of lines) with assertions that must all hold, or cases:
    `[{"input": "1 2", "output": "3"}, ...]`, or `{"inputs": [...], "outputs": [...]}`, also as text
    in CSV files; lines are compared without trailing whitespace. A row without tests has no reward.
    """
    column = config.reads_column or ""

    def score(episode: Episode) -> float | None:
        tests = episode.extra.get(column)
        if isinstance(tests, str) and tests.lstrip().startswith(("[", "{")):
            tests = parse_literal(tests)
        if tests is None or tests in ("", [], {}):
            return None
        program = program_in(episode.response)
        cases = parse_cases(tests)
        if cases is not None:
            return _share_right(program, cases, config)
        code = "\n".join(tests) if isinstance(tests, list) else str(tests)
        require_assertions(code)
        return float(_passes(program, code, _limits(config, config.seconds)))

    return one_by_one(score)


def check_sandbox(config: RewardConfig) -> None:
    """Check that a program that does nothing runs in the sandbox.

    Raises:
        ConfigError: the machine can't isolate programs as in the settings.
    """
    limits = _limits(config, 20.0)
    try:
        ended = run_python({"main.py": "print(6 * 7)"}, main="main.py", stdin="", limits=limits)
    except SandboxError as error:
        problem = str(error)
    else:
        if ended.output.strip() == b"42":
            return
        problem = f"a test program failed with exit code {ended.code}"
    hint = (
        "enable user namespaces and Landlock in the container or kernel, or set sandbox: process"
        " for programs that you trust"
        if config.sandbox == "namespaces"
        else "raise memory_mb"
    )
    raise ConfigError(f"rewards.{config.name}.sandbox: {problem}; {hint}")


def program_in(response: str) -> str:
    """The last fenced Python block of a response, closed or not; else the full response."""
    blocks = _FENCED.findall(response)
    return blocks[-1] if blocks else response


def parse_cases(tests: object) -> list[tuple[str, str]] | None:
    """Inputs and outputs of the tests; None if the tests are code.

    Raises:
        ValueError: the tests are neither cases nor code.
    """
    if isinstance(tests, str):
        return None
    if isinstance(tests, Mapping) and tests.get("fn_name"):
        raise ValueError("tests that call a function (fn_name) can't be read; write assertions")
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= tests.keys():
        inputs, outputs = tests["inputs"], tests["outputs"]
        if len(inputs) == len(outputs):
            return [(_text(each), _text(out)) for each, out in zip(inputs, outputs, strict=True)]
    if isinstance(tests, list) and all(isinstance(each, str) for each in tests):
        return None
    if isinstance(tests, list) and all(
        isinstance(each, Mapping) and {"input", "output"} <= each.keys() for each in tests
    ):
        return [(_text(each["input"]), _text(each["output"])) for each in tests]
    raise ValueError("the tests are neither code nor inputs and outputs")


_DEFINITIONS = (ast.AsyncFunctionDef, ast.ClassDef, ast.FunctionDef, ast.Import, ast.ImportFrom)
_NO_TESTS = (*_DEFINITIONS, ast.AnnAssign, ast.Assign, ast.Constant, ast.Pass)


def require_assertions(code: str) -> None:
    """Raise ValueError for tests that no program or every program would pass."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the tests are not valid Python: {error}") from None
    lines = [line.value if isinstance(line, ast.Expr) else line for line in body]
    run = [ast.unparse(line) for line in lines if not isinstance(line, _NO_TESTS)]
    if all("__main__" in text.partition("\n")[0] for text in run):
        raise ValueError("the tests only define functions; call them, or write assertions")


def _text(value: Any) -> str:  # noqa: ANN401
    """Text of a list with one item per line, as in programming contests."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _limits(config: RewardConfig, seconds: float) -> Limits:
    return Limits(seconds, config.memory_mb, isolated=config.sandbox == "namespaces")


def _passes(program: str, tests: str, limits: Limits) -> bool:
    token = secrets.token_hex(16)
    files = {"solution.py": program, "tests.py": tests, "main.py": _WITH_TESTS}
    ended = run_python(files, main="main.py", stdin=f"{token}\n", limits=limits)
    return ended.code == 0 and ended.output.endswith(token.encode())


def _share_right(program: str, cases: list[tuple[str, str]], config: RewardConfig) -> float:
    """The fraction of cases that the program passes, within `config.seconds` in total."""
    deadline = time.monotonic() + config.seconds
    right = 0
    for given, wanted in cases:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        limits = _limits(config, left)
        ended = run_python({"main.py": program}, main="main.py", stdin=given, limits=limits)
        right += _is_right(ended, wanted)
    return right / len(cases)


def _is_right(ended: Ended, wanted: str) -> bool:
    return ended.code == 0 and _lines(ended.output.decode(errors="replace")) == _lines(wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
