"""The log: one line a message on standard error, ours and the warnings of other packages."""

import logging
import sys
from contextlib import suppress

import transformers

OUR_LOGGERS = (
    *("inference", "pipeline", "rewards", "evaluation"),
    *("step0_pretrain", "step1_sft", "step2_reward", "step3_ppo", "step3_preference", "__main__"),
)


def configure_logging(*, is_main: bool) -> None:
    """Log one line a message, `HH:MM:SS message`, to standard error.

    Rank 0 shows our messages and the warnings of libraries; other ranks show errors only.
    """
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers = [old for old in root.handlers if not isinstance(old, _StderrHandler)]
    root.addHandler(handler)
    root.setLevel(logging.WARNING if is_main else logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # loading checks for missing weights itself
    for name in OUR_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO if is_main else logging.ERROR)


class _StderrHandler(logging.Handler):
    """Writes to what sys.stderr is at the moment: a progress bar puts itself in between."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # a terminal that was closed ends no run
            sys.stderr.write(self.format(record) + "\n")
