"""The names and ranges of `optim.schedule_params`."""

import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.config.schedules import SCHEDULES
from pipeline.errors import ConfigError, suggestion

RANGES: dict[str, Callable[[float], bool]] = {
    "above 0": lambda value: 0 < value < math.inf,
    "0 or above": lambda value: 0 <= value < math.inf,
    "between 0 and 1": lambda value: 0 <= value <= 1,
    "at least 0 and below 1": lambda value: 0 <= value < 1,
}
"""Whether a value lies in a range, by the words that annotate a parameter with it."""


def check_schedule_params(schedule: str, given: Mapping[str, Any]) -> None:
    """Raise unless `given` are parameters of the schedule, of the right type and in range.

    Raises:
        ConfigError: one sentence that starts with the name of the setting.
    """
    known = schedule_params(schedule)
    for name, value in given.items():
        setting = f"optim.schedule_params.{name}"
        if name not in known:
            hint = suggestion(name, known)
            raise ConfigError(f"{setting} is not a parameter of the schedule {schedule}; {hint}")
        expected = _expected(known[name], value)
        if expected:
            raise ConfigError(f"{setting} must be {expected}, got {value}")


def schedule_params(schedule: str) -> dict[str, Any]:
    """The parameters that a schedule takes, with their annotated types."""
    found: dict[str, Any] = {}
    for function in (SCHEDULES[schedule].share, SCHEDULES[schedule].momentum):
        if function is not None:
            hints = typing.get_type_hints(function, include_extras=True)
            found |= {name: hints[name] for name in keyword_only(function)}
    return found


@functools.cache
def keyword_only(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the arguments that can only be given by name."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)


def _expected(kind: Any, value: object) -> str:  # noqa: ANN401
    """What `value` should have been, in words; empty where it is that."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind = typing.get_args(kind)[0]  # X of `X | None`
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        return "" if value in choices else " or ".join(choices)
    if kind is bool:
        return "" if isinstance(value, bool) else "true or false"
    number, words = typing.get_args(kind)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    wanted = int if number is int else int | float
    if is_number and isinstance(value, wanted) and RANGES[words](value):
        return ""
    return f"a {'whole ' if wanted is int else ''}number {words}"
