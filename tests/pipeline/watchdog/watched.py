"""A step of two processes that fails in the way that its argument names."""

import os
import signal
from collections.abc import Sequence

from pipeline.cli.options import run_main
from pipeline.parallel.mesh import current_mesh
from pipeline.parallel.process_group import process_group
from pipeline.system.errors import ConfigError
from pipeline.watchdog.process import watch_processes


def main(argv: Sequence[str]) -> None:
    (case,) = argv
    if case == "wrong settings":
        raise ConfigError("there is no such file")
    with process_group(watch_processes, 30):
        current_mesh().world.sum(1)
        if case == "killed" and current_mesh().world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        current_mesh().world.sum(1)


if __name__ == "__main__":
    run_main(main)
