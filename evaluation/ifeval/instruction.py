"""What an instruction is: a program that says whether a text follows it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import DataError

Arguments = Mapping[str, Any]
"""The `kwargs` of an instruction in a row; those that are null are left out."""


@dataclass(frozen=True)
class Instruction:
    """One kind of instruction."""

    follows: Callable[[str, Arguments], bool]
    """Whether a text, which is not empty, follows it."""

    needs: Mapping[str, type | tuple[type, ...]] = field(default_factory=dict)
    """Its arguments and their types."""

    one_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Arguments that take a few words alone, and the words."""

    def check(self, arguments: Arguments, where: str) -> None:
        """Raise DataError, which begins with `where`, unless the arguments are complete."""
        for name, kind in self.needs.items():
            if not isinstance(arguments.get(name), kind) or isinstance(arguments[name], bool):
                raise DataError(f"{where} needs {name}, got {arguments.get(name)!r}")
            value = arguments[name]
            if isinstance(value, list) and not all(isinstance(each, str) for each in value):
                raise DataError(f"{where}: {name} must hold texts alone, got {value!r}")
            if isinstance(value, float) and not math.isfinite(value):
                raise DataError(f"{where}: {name} must be finite, got {value!r}")
        for name, words in self.one_of.items():
            if arguments.get(name) not in words:
                raise DataError(
                    f"{where}: {name} must be one of {', '.join(words)}, got"
                    f" {arguments.get(name)!r}"
                )


RELATIONS = ("at least", "less than")


def holds(count: int, relation: str, bound: int) -> bool:
    """Whether a count is at least, or less than, a bound."""
    return count >= bound if relation == "at least" else count < bound
