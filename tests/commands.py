"""Commands as a user types them, in processes that a server forks after it has imported everything.

Importing takes five processor seconds, most of what a short command takes.
"""

import os
import runpy
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

from tests.distributed import PROCESSES
from tests.sources import ROOT


def run_command(
    *argv: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None, stdin: str = ""
) -> CompletedProcess[str]:
    """`python ARGV...`, which begins with a file or with -m MODULE, and what it printed."""
    (done,) = run_together([argv], cwd=cwd, env=env, stdin=stdin)
    return done


def run_together(
    commands: Sequence[Sequence[str]],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    as_job: bool = False,
) -> list[CompletedProcess[str]]:
    """Commands that run side by side, with the variables of torchrun if they are ranks of a job."""
    env = dict(os.environ if env is None else env)
    if as_job:
        with socket.create_server(("127.0.0.1", 0)) as server:
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        env |= {"WORLD_SIZE": str(len(commands)), "LOCAL_WORLD_SIZE": str(len(commands))}
    with TemporaryDirectory() as directory:
        started = []
        for rank, argv in enumerate(commands):
            streams = [Path(directory) / f"{name}.{rank}" for name in ("stdin", "out", "err")]
            streams[0].write_text(stdin)
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if as_job else {}
            process = PROCESSES.Process(target=_run, args=(argv, cwd, env | own, streams))
            process.start()
            started.append((argv, process, streams))
        done = []
        for argv, process, (_, out, err) in started:
            process.join()
            done.append(
                CompletedProcess(argv, process.exitcode or 0, out.read_text(), err.read_text())
            )
        return done


def _run(argv: Sequence[str], cwd: Path, env: Mapping[str, str], streams: Sequence[Path]) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, stream in enumerate(streams):
        stream.touch()
        os.dup2(os.open(stream, os.O_RDWR), number)
    sys.stdin = os.fdopen(0)
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(argv)
        runpy.run_path(argv[0], run_name="__main__")
