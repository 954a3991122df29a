"""Keeping log lines out of what is being printed."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler


@contextmanager
def held_logs() -> Iterator[None]:
    """Hold what is logged, warnings included, until the end of the block; then log it."""
    loggers = [logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)]
    talking = {logger: logger.handlers for logger in loggers if logger.handlers}
    for logger, handlers in talking.items():
        # A level that no record has: nothing is let through before the end.
        logger.handlers = [
            MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1, target=handler)
            for handler in handlers
        ]
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, handlers in talking.items():
            held, logger.handlers = logger.handlers, handlers
            for handler in held:
                handler.close()
