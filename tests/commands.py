"""Commands as a user types them, in processes forked from a server with all imports done.

Importing takes five to eight CPU seconds, most of the time of a short command. In a command,
`sys.executable` is a program that has `-m MODULE` forked in the same way, such as a step.
"""

import atexit
import functools
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from tests.distributed import PROCESSES
from tests.sources import ROOT


def run_command(
    *argv: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None, stdin: str = ""
) -> CompletedProcess[str]:
    """Run `python ARGV...`, where ARGV starts with a file or with -m MODULE."""
    (result,) = run_concurrently([argv], cwd=cwd, env=env, stdin=stdin)
    return result


def run_concurrently(
    commands: Sequence[Sequence[str]],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    as_job: bool = False,
) -> list[CompletedProcess[str]]:
    """Run commands concurrently, with torchrun's variables if they are ranks of a job."""
    env = dict(os.environ if env is None else env)
    if as_job:
        with socket.create_server(("127.0.0.1", 0)) as server:
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        env |= {"WORLD_SIZE": str(len(commands)), "LOCAL_WORLD_SIZE": str(len(commands))}
    with TemporaryDirectory() as directory:
        started = []
        for rank, argv in enumerate(commands):
            streams = Path(directory) / str(rank)
            variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if as_job else {}
            all_env = env | variables
            process = start_command(*argv, streams=streams, cwd=cwd, env=all_env, stdin=stdin)
            started.append((argv, process, streams))
        results = []
        for argv, process, streams in started:
            process.join()
            texts = ((streams / name).read_text() for name in ("out", "err"))
            results.append(CompletedProcess(argv, process.exitcode or 0, *texts))
        return results


def start_command(
    *argv: str, streams: Path, cwd: Path = ROOT, env: Mapping[str, str], stdin: str = ""
) -> BaseProcess:
    """Start a command whose streams are the files stdin, out and err in a new directory."""
    files = [streams / name for name in ("stdin", "out", "err")]
    streams.mkdir()
    files[0].write_text(stdin)
    process = PROCESSES.Process(target=_run, args=(argv, cwd, dict(env), files, forking_python()))
    process.start()
    return process


FORKING_PYTHON = """#!{python} -ISE
import json, os, signal, socket, sys
words = [word for word in sys.argv[1:] if word != "-u"]
if words[0] != "-m":
    os.execv("{python}", ["{python}", *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect("{address}")
request = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [request], [0, 1, 2])
pid = int(server.recv(64))
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int(server.recv(64))
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
"""Python, but for `-m MODULE` the process is forked by `_serve`; signals are forwarded to it."""


@functools.cache
def forking_python() -> Path:
    """Start this process's server and return the path of its `FORKING_PYTHON`."""
    directory = Path(tempfile.mkdtemp(prefix="forking"))
    program, address = directory / "python", directory / "socket"
    program.write_text(FORKING_PYTHON.format(python=sys.executable, address=address))
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(address))
        listening.listen()
        server = PROCESSES.Process(target=_serve, args=(listening, program))
        server.start()
    Finalize(None, _stop, args=(server, directory), exitpriority=1)
    return program


def _stop(server: BaseProcess, directory: Path) -> None:
    server.kill()
    shutil.rmtree(directory)


def _serve(listening: socket.socket, program: Path) -> None:
    """Fork a process for each request, and report its exit code; kill it with its client."""
    clients: dict[socket.socket, int] = {}
    while True:
        ready, _, _ = select.select([listening, *clients], [], [], 0.02)
        for client in ready:
            if client is not listening:
                os.kill(clients[client], signal.SIGKILL)
                continue
            connection, _ = listening.accept()
            request, files, _, _ = socket.recv_fds(connection, 2**20, 3)
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)
                _exit_with(*json.loads(request), files, program)
            for file in files:
                os.close(file)
            with suppress(BrokenPipeError):
                connection.send(str(pid).encode())
            clients[connection] = pid
        for client, pid in list(clients.items()):
            exited, status = os.waitpid(pid, os.WNOHANG)
            if exited:
                with client, suppress(BrokenPipeError):  # its client was killed
                    client.send(str(os.waitstatus_to_exitcode(status)).encode())
                del clients[client]


def _exit_with(*command: Any) -> NoReturn:
    """Run a command and exit as Python does."""
    code: object = 0
    try:
        _start(*command)
    except SystemExit as stopped:
        code = stopped.code
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    if not isinstance(code, int | None):
        sys.stderr.write(f"{code}\n")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _run(
    argv: Sequence[str], cwd: Path, env: Mapping[str, str], streams: Sequence[Path], program: Path
) -> None:
    for stream in streams:
        stream.touch()
    _start(argv, cwd, env, [os.open(stream, os.O_RDWR) for stream in streams], program)


def _start(
    argv: Sequence[str],
    cwd: str | Path,
    env: Mapping[str, str],
    files: Sequence[int],
    program: Path,
) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, file in enumerate(files):
        os.dup2(file, number)
    sys.stdin = os.fdopen(0)
    sys.executable = str(program)
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        sys.modules.pop(argv[1], None)
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(argv)
        runpy.run_path(argv[0], run_name="__main__")
