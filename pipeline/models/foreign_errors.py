"""What transformers says as it loads, in as many words as fit into a sentence."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging


@contextmanager
def errors_only() -> Iterator[None]:
    """Without transformers' tables and advice; what matters of them we say ourselves."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


LONGEST_REASON = 200
"""Characters of somebody else's message that fit into a sentence of ours."""


def first_words(error: Exception) -> str:
    """The first lines of the message, as one, behind the kind of error where it is a bare word."""
    lines = " ".join(str(error).split("\n\n")[0].split())
    if isinstance(error, KeyError) or not lines:
        lines = f"{type(error).__name__} {lines}".strip()
    return lines if len(lines) <= LONGEST_REASON else lines[:LONGEST_REASON].rstrip() + " ..."
