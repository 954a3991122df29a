r"""Compare formulas, intervals and sets with math-verify (huggingface/Math-Verify).

It parses LaTeX and compares with SymPy. For inputs such as 9^{9^{9^9}}, both may use unlimited time
and memory without returning to Python, so each comparison runs in a child process with a deadline.
"""

import functools
import logging
import multiprocessing
import resource
from multiprocessing.connection import Connection

import psutil

TIMEOUT_SECONDS, MEMORY_BYTES = 3.0, 2**30
"""Limits of a comparison: time, and memory that it may allocate."""


def are_equivalent(gold: str, answer: str) -> bool:
    """Return whether two answers are equivalent, or False if time or memory runs out first."""
    _preload()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_compare, args=(gold, answer, sender))
    child.start()
    sender.close()
    try:
        return receiver.poll(TIMEOUT_SECONDS) and bool(receiver.recv())
    except EOFError:  # it ran out of memory
        return False
    finally:
        child.kill()
        child.join()


@functools.cache
def _preload() -> None:
    """Import math-verify and build its tables, which all child processes then inherit."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no deadline
    _verify("x^2", r"\frac{1}{2}")


def _compare(gold: str, answer: str, sender: Connection) -> None:
    limit = psutil.Process().memory_info().vms + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sender.send(_verify(gold, answer))


def _verify(gold: str, answer: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify

    extraction_config = [LatexExtractionConfig(boxed_match_priority=0)]
    gold_parsed, answer_parsed = (
        parse(f"\\boxed{{{text}}}", extraction_config, parsing_timeout=0) for text in (gold, answer)
    )
    return verify(gold_parsed, answer_parsed, timeout_seconds=0)
