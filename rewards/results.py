"""What a user's function returned, checked: nothing that is not a number becomes one."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rewards.contract import Outcome


def outcomes_of(returned: object, count: int) -> list[Outcome]:
    """One outcome for each of `count` episodes from what a function returned for them.

    A wrong number of results fails all of them, since none can be matched to a response; a result
    that is neither a finite number nor None fails its episode alone.
    """
    if isinstance(returned, str | bytes | Mapping) or not hasattr(returned, "__iter__"):
        return everywhere(f"it returned {_described(returned)}, not a list of numbers", count)
    results = list(returned)  # type: ignore[call-overload]
    if len(results) != count:
        return everywhere(f"it returned {len(results)} results for {count} responses", count)
    return [outcome_of(result) for result in results]


def outcome_of(result: object) -> Outcome:
    """A finite number (also of NumPy, or a tensor of one element), or None."""
    if result is None:
        return Outcome()
    if isinstance(result, str | bytes) or not hasattr(result, "__float__"):
        return Outcome.failed(f"it gave {_described(result)} where a number or None belongs")
    try:
        number = float(result)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        return Outcome.failed(f"it gave {_described(result)}, which is not a number: {error}")
    if not math.isfinite(number):
        return Outcome.failed(f"it gave {number}, which is not finite")
    return Outcome(number)


def everywhere(sentence: str, count: int) -> list[Outcome]:
    """The same failure for all episodes of a call."""
    return [Outcome.failed(sentence)] * count


def of_error(error: BaseException, count: int) -> list[Outcome]:
    """The failure of all episodes of a call that raised."""
    return everywhere(f"it raised {type(error).__name__}: {error}", count)


def member(returned: object, names: Sequence[str]) -> Any:  # noqa: ANN401
    """What a mapping holds under the first of `names` that it has; other things as they are."""
    if isinstance(returned, Mapping):
        return next((returned[name] for name in names if name in returned), returned)
    return returned


def _described(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
