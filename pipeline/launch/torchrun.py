"""torchrun whose exit code is that of the first process that failed.

`python -m pipeline.launch.torchrun` takes torchrun's options. torchrun itself turns every failure
into exit code 1 below a page of its own; here the failed process has already said what is wrong.
"""

import logging
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from pipeline.cli import EXIT_INTERRUPTED


def main(argv: list[str]) -> int:
    """Run the processes; return the exit code."""
    logging.disable(logging.ERROR)  # of this process, which only starts and watches the others
    try:
        run(parse_args(argv))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except (KeyboardInterrupt, SignalException):
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
