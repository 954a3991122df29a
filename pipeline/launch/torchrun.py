"""torchrun whose exit code is that of the first process that failed.

`python -m pipeline.launch.torchrun` takes torchrun's options. torchrun itself turns every failure
into exit code 1 below a page of its own; here the failed process has already said what is wrong.
A scheduler's signals reach the processes, which get the time they need to save their state.
"""

import argparse
import logging
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from pipeline.cli import EXIT_INTERRUPTED
from pipeline.signals import EXIT_REQUEUE, STOP_SIGNALS

GRACE_SECONDS = 600
"""Until processes that were told to stop are killed; a scheduler's own patience ends sooner."""


def main(argv: list[str]) -> int:
    """Run the processes; return the exit code."""
    logging.disable(logging.ERROR)  # of this process, which only starts and watches the others
    try:
        run(_patient(parse_args(argv)))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as stopped:
        return EXIT_REQUEUE if stopped.sigval in STOP_SIGNALS else EXIT_INTERRUPTED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _patient(options: argparse.Namespace) -> argparse.Namespace:
    """Have torchrun pass on SIGUSR1 too, and wait while the processes save."""
    if hasattr(options, "signals_to_handle"):
        options.signals_to_handle += ",SIGUSR1"
    if getattr(options, "shutdown_timeout", 0) is None:
        options.shutdown_timeout = GRACE_SECONDS
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
