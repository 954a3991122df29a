r"""Formulas, intervals and sets, compared by math-verify (huggingface/Math-Verify).

It reads LaTeX and compares by SymPy. Both may take any time and memory, without returning to
Python: 9^{9^{9^9}}. So a comparison runs in a child process, which is killed at its deadline.
"""

import functools
import logging
import multiprocessing
import resource
from multiprocessing.connection import Connection

import psutil

SECONDS, MEMORY = 3.0, 2**30
"""Deadline of a comparison, and the bytes that it may allocate."""


def equal(gold: str, answer: str) -> bool:
    """Whether two answers mean the same; False if time or memory runs out first."""
    _load()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_compare, args=(gold, answer, sender))
    child.start()
    sender.close()
    try:
        return receiver.poll(SECONDS) and bool(receiver.recv())
    except EOFError:  # it ran out of memory
        return False
    finally:
        child.kill()
        child.join()


@functools.cache
def _load() -> None:
    """Import math-verify and let it build its tables, which every child then inherits."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no deadline
    _are_equal("x^2", r"\frac{1}{2}")


def _compare(gold: str, answer: str, sender: Connection) -> None:
    most = psutil.Process().memory_info().vms + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    sender.send(_are_equal(gold, answer))


def _are_equal(gold: str, answer: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify

    latex = [LatexExtractionConfig(boxed_match_priority=0)]
    one, other = (parse(f"\\boxed{{{each}}}", latex, parsing_timeout=0) for each in (gold, answer))
    return verify(one, other, timeout_seconds=0)
