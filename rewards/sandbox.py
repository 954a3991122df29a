"""Rewards from unit tests: programs in responses, run in a sandbox.

A program runs in separate namespaces (no network, other processes or privileges), in an empty
in-memory directory, with all other mounts read-only, Landlock denying access to all other files
except Python's, a minimal environment, and limits on memory, CPU time, processes, files and output.
At the deadline the kernel kills every process that the program started. `sandbox_child.py` runs in
the sandbox. A program can still exploit a kernel vulnerability, so keep the kernel up to date.

A program that crashes, hangs or runs out of memory does not pass the test. The reward source itself
fails only if the sandbox can't be built or the tests can't be read.
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
from rewards.contract import Episode, Scorer, per_episode_scorer
from rewards.workers import kill_tree

CHILD = Path(__file__).with_name("sandbox_child.py")
MAX_PROCESSES = 16
"""Maximum processes and threads of a program."""

DISK_MB = 64
"""Size limit in MiB of a program's directory, and of each of its files, including its output."""

OUTPUT_BYTES = 1 << 20
"""Maximum bytes of output; a program that writes more does not pass the test."""

_MOUNT_POINTS = ("/mnt", "/srv", "/media", "/tmp")
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
class ProgramResult:
    """Exit code and output of a program."""

    exit_code: int | None
    """Exit code, or 128 plus the signal that killed it; None if it exceeded the deadline or
    wrote too much."""

    output: bytes
    """Standard output, at most `OUTPUT_BYTES`."""

    seconds: float


def run_python(files: Mapping[str, str], *, main: str, stdin: str, limits: Limits) -> ProgramResult:
    """Run the file `main` in a directory that contains all `files`.

    Raises:
        SandboxError: the machine doesn't support the isolation.
    """
    start_time = time.monotonic()
    with ExitStack() as stack:
        if limits.isolated:
            directory = _find_mount_point()
        else:
            directory = stack.enter_context(_temporary_directory())
        job, stdin_file, output, status = (
            stack.enter_context(tempfile.TemporaryFile()) for _ in range(4)
        )
        job.write(marshal.dumps(_make_job(files, main, limits, directory)))
        stdin_file.write(stdin.encode(errors="replace"))
        for file in (job, stdin_file):
            file.seek(0)
        process = subprocess.Popen(
            [_interpreter(), "-I", "-S", str(CHILD), str(job.fileno()), str(status.fileno())],
            stdin=stdin_file,
            stdout=output,
            stderr=subprocess.DEVNULL,
            pass_fds=[job.fileno(), status.fileno()],
            start_new_session=True,
            env={},
            cwd="/",
        )
        try:
            exit_code = process.wait(max(0.0, start_time + limits.seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            _terminate(process)
        status.seek(0)
        if message := status.read():
            raise SandboxError(f"the sandbox can't be built ({message.decode(errors='replace')})")
        output.seek(0)
        written = output.read(OUTPUT_BYTES + 1)
    exit_code = exit_code if len(written) <= OUTPUT_BYTES else None
    return ProgramResult(exit_code, written[:OUTPUT_BYTES], time.monotonic() - start_time)


def _make_job(
    files: Mapping[str, str], main: str, limits: Limits, directory: str
) -> dict[str, object]:
    mount_point, prefix = directory, sys.base_prefix
    interpreter = _interpreter()
    python = prefix
    if limits.isolated:
        directory, python = f"{mount_point}/work", f"{mount_point}/python"
        interpreter = interpreter.replace(prefix, python, 1)
    return {
        "parent": os.getpid(),
        "isolated": limits.isolated,
        "mount_point": mount_point,
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
        "processes": MAX_PROCESSES,
    }


def _interpreter() -> str:
    """Return the path of the base interpreter, which ignores a virtual environment's packages."""
    return os.path.realpath(sys.executable)


def _find_mount_point() -> str:
    """Return a directory that doesn't contain Python; a tmpfs will be mounted over it."""
    for mount_point in _MOUNT_POINTS:
        if Path(mount_point).is_dir() and not sys.base_prefix.startswith(f"{mount_point}/"):
            return mount_point
    raise SandboxError(f"one of {', '.join(_MOUNT_POINTS)} must exist and not contain Python")


def _temporary_directory() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="rlhf-sandbox-", ignore_cleanup_errors=True)


def _terminate(process: "subprocess.Popen[bytes]") -> None:
    """Kill the program and its descendants, then wait for the outermost process."""
    if process.poll() is None:
        kill_tree(process.pid, include_self=False)
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            process.wait()


_CODE_BLOCK = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)

_TEST_RUNNER = """\
import os, sys
def run():
    token = sys.stdin.readline().strip()
    namespace = {"__name__": "solution"}
    for path in ("solution.py", "tests.py"):
        with open(path, encoding="utf-8") as file:
            exec(compile(file.read(), path, "exec"), namespace)
    sys.stdout.flush()
    os.write(1, token.encode())
run()
"""
"""Runs a solution and its tests; if it exits before the tests end, the token is never written."""


def code_scorer(config: RewardConfig) -> Scorer:
    """Return a scorer that gives the fraction of a row's tests that the response's program passes.

    The program is the last fenced block of the response, or the whole response if it has none.
    Tests are Python code (or a list of lines) with assertions that must all hold, or input/output
    pairs, `[{"input": "1 2", "output": "3"}, ...]` or `{"inputs": [...], "outputs": [...]}`, or
    either as a string. Trailing whitespace in outputs is ignored. A row without tests has no
    reward.
    """

    def score(episode: Episode) -> float | None:
        tests = episode.extra.get(config.resolved_column)
        if isinstance(tests, str) and tests.lstrip().startswith(("[", "{")):
            tests = parse_literal(tests)
        if tests is None or tests in ("", [], {}):
            return None
        program = extract_program(episode.response)
        cases = parse_cases(tests)
        if cases is not None:
            return _pass_rate(program, cases, config)
        code = "\n".join(tests) if isinstance(tests, list) else str(tests)
        require_assertions(code)
        return float(_passes_tests(program, code, _make_limits(config, config.seconds)))

    return per_episode_scorer(score)


def check_sandbox(config: RewardConfig) -> None:
    """Check that a trivial program runs in the sandbox.

    Raises:
        ConfigError: the machine can't isolate programs as the settings require.
    """
    limits = _make_limits(config, 20.0)
    try:
        result = run_python({"main.py": "print(6 * 7)"}, main="main.py", stdin="", limits=limits)
    except SandboxError as error:
        problem = str(error)
    else:
        if result.output.strip() == b"42":
            return
        if result.exit_code is None:
            raise ConfigError(
                f"rewards.{config.name}.sandbox: a test program took longer than"
                f" {limits.seconds:g} s; try again when the machine is less busy"
            )
        problem = f"a test program failed with exit code {result.exit_code}"
    hint = (
        "enable user namespaces and Landlock in the container or kernel, or set sandbox: process"
        " for programs that you trust"
        if config.sandbox == "namespaces"
        else "raise memory_mb"
    )
    raise ConfigError(f"rewards.{config.name}.sandbox: {problem}; {hint}")


def extract_program(response: str) -> str:
    """Return the last fenced Python block of a response, closed or not; else the full response."""
    blocks = _CODE_BLOCK.findall(response)
    return blocks[-1] if blocks else response


def parse_cases(tests: object) -> list[tuple[str, str]] | None:
    """Parse the tests as input/output pairs; return None if they are code.

    Raises:
        ValueError: the tests are neither code nor such pairs.
    """
    if isinstance(tests, str):
        return None
    if isinstance(tests, Mapping) and tests.get("fn_name"):
        raise ValueError("tests that call a function (fn_name) are not supported; use assertions")
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= tests.keys():
        inputs, outputs = tests["inputs"], tests["outputs"]
        if len(inputs) == len(outputs):
            return [*zip(map(_join_lines, inputs), map(_join_lines, outputs), strict=True)]
    if isinstance(tests, list) and all(isinstance(line, str) for line in tests):
        return None
    if isinstance(tests, list) and all(
        isinstance(case, Mapping) and {"input", "output"} <= case.keys() for case in tests
    ):
        return [(_join_lines(case["input"]), _join_lines(case["output"])) for case in tests]
    raise ValueError("the tests must be code or input/output pairs")


_DEFINITIONS = (ast.AsyncFunctionDef, ast.ClassDef, ast.FunctionDef, ast.Import, ast.ImportFrom)
_NON_TEST_NODES = (*_DEFINITIONS, ast.AnnAssign, ast.Assign, ast.Constant, ast.Pass)


def require_assertions(code: str) -> None:
    """Raise ValueError if the tests are not valid Python, or if they test nothing."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the tests are not valid Python: {error}") from None
    nodes = [node.value if isinstance(node, ast.Expr) else node for node in body]
    tests = [ast.unparse(node) for node in nodes if not isinstance(node, _NON_TEST_NODES)]
    if all("__main__" in text.partition("\n")[0] for text in tests):
        raise ValueError("the tests check nothing; write assertions, or call the test functions")


def _join_lines(value: Any) -> str:  # noqa: ANN401
    """Join the items of a list, one per line, as in programming contests."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _make_limits(config: RewardConfig, seconds: float) -> Limits:
    return Limits(seconds, config.memory_mb, isolated=config.sandbox == "namespaces")


def _passes_tests(program: str, tests: str, limits: Limits) -> bool:
    token = secrets.token_hex(16)
    files = {"solution.py": program, "tests.py": tests, "main.py": _TEST_RUNNER}
    result = run_python(files, main="main.py", stdin=f"{token}\n", limits=limits)
    return result.exit_code == 0 and result.output.endswith(token.encode())


def _pass_rate(program: str, cases: list[tuple[str, str]], config: RewardConfig) -> float:
    """Return the fraction of cases that the program passes, within `config.seconds` in total."""
    deadline = time.monotonic() + config.seconds
    num_passed = 0
    for stdin, expected in cases:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        limits = _make_limits(config, remaining)
        result = run_python({"main.py": program}, main="main.py", stdin=stdin, limits=limits)
        num_passed += _passes_case(result, expected)
    return num_passed / len(cases)


def _passes_case(result: ProgramResult, expected: str) -> bool:
    output = result.output.decode(errors="replace")
    return result.exit_code == 0 and _strip_lines(output) == _strip_lines(expected)


def _strip_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
