"""Checks of calls against the shapes and dtypes that functions annotate."""

import inspect
from functools import partial, wraps
from itertools import count
from typing import Any

import jaxtyping

CHECKED_CALLS = 20
"""Number of first calls of a function, all of which are checked."""

CHECK_EVERY = 50
"""One of this many later calls is checked."""

jaxtyped = jaxtyping.jaxtyped


def check_shapes(function: Any = None, *, typechecker: Any) -> Any:
    """Check a sample of the calls of a function; a replacement of `jaxtyping.jaxtyped`.

    The original checks every call of every function in a module, and wraps nested functions anew
    whenever they are defined; the tests then take twice the time. This one checks only functions
    and methods at module level that annotate shapes. Other types are checked by pyrefly.
    """
    if function is None:
        return partial(check_shapes, typechecker=typechecker)
    if not inspect.isfunction(function):
        return jaxtyped(function, typechecker=typechecker)
    annotations = " ".join(map(str, function.__annotations__.values()))
    if "<locals>" in function.__qualname__ or "jaxtyping" not in annotations:
        return function
    calls = count()
    checked: Any = None

    @wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        nonlocal checked
        number = next(calls)
        if number >= CHECKED_CALLS and number % CHECK_EVERY:
            return function(*args, **kwargs)
        if checked is None:  # takes a millisecond, which most functions of a test run never need
            checked = jaxtyped(function, typechecker=typechecker)
        return checked(*args, **kwargs)

    return call
