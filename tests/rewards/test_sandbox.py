"""rewards/sandbox.py: attacks by real programs, on the kernel of this machine.

If the kernel doesn't support namespaces or Landlock, the attacks are skipped, and the error is
tested instead.
"""

import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import psutil
import pytest

from rewards.sandbox import OUTPUT_BYTES, Limits, ProgramResult, SandboxError, run_python
from tests.rewards.processes import command_line

LIMITS = Limits(seconds=10.0, memory_mb=512)
PLAIN = Limits(seconds=10.0, memory_mb=512, isolated=False)


def run(program: str, *, limits: Limits = LIMITS, stdin: str = "") -> ProgramResult:
    return run_python({"main.py": program}, main="main.py", stdin=stdin, limits=limits)


@cache
def is_sandbox_supported() -> bool:
    try:
        return run("print(1)").output == b"1\n"
    except SandboxError:
        return False


isolated = pytest.mark.skipif("not is_sandbox_supported()", reason="the kernel lacks namespaces")


def count_descendants() -> int:
    return len(psutil.Process().children(recursive=True))


@isolated
def test_program_has_only_its_input_and_files() -> None:
    program = """
import os, sys
import helper
print(sys.stdin.read(), helper.value, sorted(os.environ), os.getuid(), len(list(os.scandir("."))))
"""
    files = {"main.py": program.replace("import helper", "sys.path.insert(0, '.'); import helper")}
    files["helper.py"] = "value = 42"

    result = run_python(files, main="main.py", stdin="given", limits=LIMITS)

    # The two files, and __pycache__.
    variables = ["HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR"]
    assert result.exit_code == 0
    assert result.output.decode().split("\n")[0] == f"given 42 {variables} 65534 3"


ATTACKS = {
    "a system file": "open('/etc/passwd').read()",
    "a system directory": "import os; os.listdir('/')",
    "permissions of a file": "import os; os.chmod('/etc/passwd', 0o777)",
    "a file in a shared directory": "open('/tmp/left-behind', 'w')",
    "a file of the Python installation": "import os; open(os.__file__, 'a')",
    "the environment of another process": "open('/proc/1/environ').read()",
    "the process table": "import os; os.listdir('/proc')",
    "another process": "import os, signal; os.kill({pid}, 0)",
    "a local server": "import socket; socket.create_connection(('127.0.0.1', {port}), 3)",
    "another machine": "import socket; socket.create_connection(('8.8.8.8', 53), 3)",
    "its own user namespace":
        "import ctypes, os\nif ctypes.CDLL(None).unshare(0x10000000): raise OSError",
    "an installed package": "import psutil",
}  # fmt: skip


@isolated
def test_program_can_not_access_the_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        values = {"pid": os.getpid(), "port": server.getsockname()[1]}
        attacks = "\n".join(
            f"try:\n    exec({attack.format(**values)!r})\n    print({name!r})\n"
            f"except (OSError, ImportError):\n    pass"
            for name, attack in ATTACKS.items()
        )

        result = run(attacks + "\nprint('end')")

    assert result.output.decode().splitlines() == ["end"]


@isolated
@pytest.mark.parametrize(
    "program",
    ["x = bytearray(1 << 30)", "import os, time\nwhile True:\n    os.fork() or time.sleep(100)"],
    ids=["memory", "processes"],
)
def test_program_that_exceeds_memory_or_processes_fails(program: str) -> None:
    before = count_descendants()

    result = run(program)

    assert result.exit_code != 0
    assert count_descendants() == before


@pytest.mark.parametrize(
    "limits",
    [pytest.param(LIMITS, marks=isolated, id="namespaces"), pytest.param(PLAIN, id="process")],
)
def test_program_ends_at_its_deadline_or_output_limit(limits: Limits) -> None:
    short_limits = replace(limits, seconds=0.5)

    looping = run("while True: pass", limits=short_limits)
    printing = run("while True: print('x' * 100_000)", limits=limits)

    assert looping.exit_code is None
    assert looping.seconds < 1.5
    assert (printing.exit_code, len(printing.output)) == (None, OUTPUT_BYTES)


ORPHAN = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(1000)", {mark!r}])
    os._exit(0)
os.wait()
time.sleep({seconds})
"""


@pytest.mark.parametrize(
    "limits",
    [pytest.param(LIMITS, marks=isolated, id="namespaces"), pytest.param(PLAIN, id="process")],
)
@pytest.mark.parametrize("seconds", [0.4, 1000])
def test_orphans_are_killed_with_their_program(limits: Limits, seconds: float) -> None:
    mark = f"orphan-{os.getpid()}-{seconds}"
    program = ORPHAN.format(mark=mark, seconds=seconds)

    result = run(program, limits=replace(limits, seconds=1.0))

    assert result.exit_code == (None if seconds > 1 else 0)
    assert not [p for p in psutil.process_iter() if mark in command_line(p)]


def test_program_is_not_run_without_namespaces(tmp_path: Path) -> None:
    """As within the sandbox, where no namespaces are available."""
    if not is_sandbox_supported():
        with pytest.raises(SandboxError, match="the sandbox can't be built"):
            run("print(1)")
        return
    program = f"""
import resource
from tests.rewards.test_sandbox import *
import ctypes
libc = ctypes.CDLL(None)
assert libc.unshare(0x10000000) == 0
Path("/proc/sys/user/max_user_namespaces").write_text("0")
try:
    run("open({str(tmp_path / "ran")!r}, 'w')")
except SandboxError as error:
    print(error)
"""

    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert process.stdout.startswith("the sandbox can't be built (unshare: "), process.stderr
    assert not (tmp_path / "ran").exists()
    assert not list(Path(tempfile.gettempdir()).glob("left-behind"))
