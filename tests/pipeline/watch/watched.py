"""A step of two processes that ends as its argument says."""

import os
import signal
from collections.abc import Sequence

from pipeline.cli import run_main
from pipeline.distributed import global_sum, rank
from pipeline.errors import ConfigError
from pipeline.process_group import process_group


def main(argv: Sequence[str]) -> None:
    (case,) = argv
    if case == "wrong settings":
        raise ConfigError("there is no such file")
    if case == "wrong setting" and os.environ["RANK"] == "1":
        raise ConfigError("rank 1 has no such file")
    with process_group(30):
        global_sum(1)
        if case == "killed" and rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        global_sum(1)


if __name__ == "__main__":
    run_main(main)
