"""Typed access to the values of a DeepSpeed configuration file."""

import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.errors import ConfigError

AUTO = "auto"


class Values:
    """The leaves of a file by dotted key; null counts as absent.

    A value "auto" takes what `given` has for the setting of ours that it stands for. Where there is
    nothing to take, the key is remembered in `unresolved` and the value counts as absent.
    """

    def __init__(self, leaves: Mapping[str, Any], *, origin: str, given: Mapping[str, Any]) -> None:
        self._leaves = leaves
        self.origin = origin
        self.given = given
        self.unresolved: list[str] = []

    def has(self, key: str) -> bool:
        """Whether the file gives `key` a value, which may be "auto"."""
        return self._leaves.get(key) is not None

    def is_auto(self, key: str) -> bool:
        """Whether the file leaves the value of `key` to others."""
        return self._leaves.get(key) == AUTO

    def under(self, section: str) -> list[str]:
        """The keys that `section` gives a value."""
        prefix = section + "."
        return [key for key in self._leaves if key.startswith(prefix) and self.has(key)]

    def raw(self, key: str, ours: str | None = None) -> Any:  # noqa: ANN401
        """The value as it stands, or for "auto" what `given` has for our setting `ours`."""
        value = self._leaves.get(key)
        if value != AUTO:
            return value
        if ours is not None and self.given.get(ours) is not None:
            return self.given[ours]
        self.unresolved.append(key)
        return None

    def whole(self, key: str, ours: str | None = None, *, low: int = 0) -> int | None:
        """A whole number of at least `low`; 5e8 is one."""
        value = self.raw(key, ours)
        if value is None:
            return None
        whole = _is_number(value) and float(value).is_integer() and value >= low
        return int(value) if whole else self._refuse(key, f"a whole number of at least {low}")

    def number(self, key: str, ours: str | None = None) -> float | None:
        """A finite number, 0 or above."""
        value = self.raw(key, ours)
        if value is None:
            return None
        fits = _is_number(value) and value >= 0
        return float(value) if fits else self._refuse(key, "a number of at least 0")

    def pair(self, key: str, ours: str | None = None) -> tuple[float, float] | None:
        """A list of two numbers."""
        value = self.raw(key, ours)
        if value is None:
            return None
        if isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value)):
            return (float(value[0]), float(value[1]))
        return self._refuse(key, "a list of two numbers")

    def flag(self, key: str) -> bool | None:
        """True or false."""
        value = self.raw(key)
        return value if value is None or isinstance(value, bool) else self._refuse(key, "a switch")

    def text(self, key: str) -> str | None:
        """A text that is not empty."""
        value = self.raw(key)
        if value is None or (isinstance(value, str) and value):
            return value
        return self._refuse(key, "text")

    def choice(self, key: str, choices: Sequence[str | int]) -> Any:  # noqa: ANN401
        """One of `choices`; upper and lower case are the same."""
        value = self.raw(key)
        plain = value.lower() if isinstance(value, str) else value
        if value is None or (plain in choices and not isinstance(value, bool)):
            return plain
        return self._refuse(key, f"one of {', '.join(map(str, choices))}")

    def one_of(self, key: str, name: str, names: Iterable[str], kind: str) -> str:
        """The text `name` that `key` has, as `names` spell it; upper and lower case are the same.

        Raises:
            ConfigError: none of them is meant; `kind` says what they are.
        """
        spelled = {each.lower(): each for each in names}
        if name.lower() in spelled:
            return spelled[name.lower()]
        hint = _meant(name.lower(), spelled) or f"use one of {', '.join(spelled.values())}"
        raise self.error(key, f"is {name}, which is not {kind} here; {hint}")

    def not_a_parameter(self, key: str, owner: str, known: Sequence[str]) -> ConfigError:
        """The error of a key that is none of the `known` parameters of `owner`."""
        name = key.rpartition(".")[2]
        hint = _meant(name, {each: each for each in known}) or f"it has {', '.join(known)}"
        return self.error(key, f"is not a parameter of {owner}; {hint}")

    def error(self, key: str, sentence: str) -> ConfigError:
        """An error whose sentence starts with the key and the file."""
        return ConfigError(f"{key} in {self.origin} {sentence}")

    def _refuse(self, key: str, kind: str) -> Any:  # noqa: ANN401
        shown = self._leaves[key]
        expected = "true or false" if kind == "a switch" else kind
        raise self.error(key, f"must be {expected}, got {shown!r}")


def _meant(name: str, spelled: Mapping[str, str]) -> str:
    close = difflib.get_close_matches(name, spelled, 1, 0.7)
    return f"did you mean {spelled[close[0]]}?" if close else ""


def _is_number(value: object) -> bool:
    largest = sys.float_info.max
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -largest <= value <= largest  # pyright: ignore[reportOperatorIssue]
