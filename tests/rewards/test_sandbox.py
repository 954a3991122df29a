"""rewards/sandbox.py: attacks by real programs, on the kernel of this machine.

Where the kernel gives no namespaces or no Landlock the attacks can't run, and the refusal is tested
instead.
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

from rewards.sandbox import OUTPUT_BYTES, Ended, Limits, SandboxError, run_python
from tests.rewards.processes import read_command

LIMITS = Limits(seconds=10.0, memory_mb=512)
PLAIN = Limits(seconds=10.0, memory_mb=512, isolated=False)


def run(program: str, *, limits: Limits = LIMITS, stdin: str = "") -> Ended:
    return run_python({"main.py": program}, main="main.py", stdin=stdin, limits=limits)


@cache
def is_possible() -> bool:
    try:
        return run("print(1)").output == b"1\n"
    except SandboxError:
        return False


isolated = pytest.mark.skipif("not is_possible()", reason="the kernel refuses namespaces here")


def children() -> int:
    return len(psutil.Process().children(recursive=True))


@isolated
def test_a_program_has_its_input_and_files_and_nothing_else() -> None:
    program = """
import os, sys
import helper
print(sys.stdin.read(), helper.value, sorted(os.environ), os.getuid(), len(list(os.scandir("."))))
"""
    files = {"main.py": program.replace("import helper", "sys.path.insert(0, '.'); import helper")}
    files["helper.py"] = "value = 42"

    ended = run_python(files, main="main.py", stdin="given", limits=LIMITS)

    # The two files, and what Python compiled of one.
    known = ["HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR"]
    assert ended.code == 0
    assert ended.output.decode().split("\n")[0] == f"given 42 {known} 65534 3"


ATTACKS = {
    "a file of the machine": "open('/etc/passwd').read()",
    "a directory of the machine": "import os; os.listdir('/')",
    "the rights of a file": "import os; os.chmod('/etc/passwd', 0o777)",
    "a file in a directory of all": "open('/tmp/left-behind', 'w')",
    "a file of Python": "import os; open(os.__file__, 'a')",
    "the environment of another process": "open('/proc/1/environ').read()",
    "the table of processes": "import os; os.listdir('/proc')",
    "another process": "import os, signal; os.kill({pid}, 0)",
    "a server of this machine": "import socket; socket.create_connection(('127.0.0.1', {port}), 3)",
    "another machine": "import socket; socket.create_connection(('8.8.8.8', 53), 3)",
    "a user namespace of its own":
        "import ctypes, os\nif ctypes.CDLL(None).unshare(0x10000000): raise OSError",
    "a package of the environment": "import psutil",
}  # fmt: skip


@isolated
def test_nothing_of_the_machine_can_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        facts = {"pid": os.getpid(), "port": server.getsockname()[1]}
        whole = "\n".join(
            f"try:\n    exec({attack.format(**facts)!r})\n    print({name!r})\n"
            f"except (OSError, ImportError):\n    pass"
            for name, attack in ATTACKS.items()
        )

        ended = run(whole + "\nprint('end')")

    assert ended.output.decode().splitlines() == ["end"]


@isolated
@pytest.mark.parametrize(
    "program",
    ["x = bytearray(1 << 30)", "import os, time\nwhile True:\n    os.fork() or time.sleep(100)"],
    ids=["memory", "processes"],
)
def test_what_takes_too_much_ends_alone(program: str) -> None:
    before = children()

    ended = run(program)

    assert ended.code != 0
    assert children() == before


@pytest.mark.parametrize(
    "limits",
    [pytest.param(LIMITS, marks=isolated, id="namespaces"), pytest.param(PLAIN, id="process")],
)
def test_a_loop_ends_at_its_deadline_and_much_output_at_its_limit(limits: Limits) -> None:
    short = replace(limits, seconds=0.5)

    loop = run("while True: pass", limits=short)
    much = run("while True: print('x' * 100_000)", limits=limits)

    assert loop.code is None
    assert loop.seconds < 1.5
    assert (much.code, len(much.output)) == (None, OUTPUT_BYTES)


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
def test_orphans_end_with_their_program(limits: Limits, seconds: float) -> None:
    """Return whether the program ends before its deadline."""
    mark = f"orphan-{os.getpid()}-{seconds}"
    program = ORPHAN.format(mark=mark, seconds=seconds)

    ended = run(program, limits=replace(limits, seconds=1.0))

    assert ended.code == (None if seconds > 1 else 0)
    assert not [each for each in psutil.process_iter() if mark in read_command(each)]


def test_a_kernel_without_namespaces_is_said_and_nothing_is_run(tmp_path: Path) -> None:
    """As within the sandbox, where no namespaces are available."""
    if not is_possible():
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

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert done.stdout.startswith("the sandbox can't be built (unshare: "), done.stderr
    assert not (tmp_path / "ran").exists()
    assert not list(Path(tempfile.gettempdir()).glob("left-behind"))
