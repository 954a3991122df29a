"""Commands as a user types them, in processes forked from a server with all imports done.

Importing takes five CPU seconds, most of the time of a short command.
"""

import os
import runpy
import socket
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

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
    process = PROCESSES.Process(target=_run, args=(argv, cwd, dict(env), files))
    process.start()
    return process


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
