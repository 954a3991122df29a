"""What rows say of responses besides which is better: labels, ties, winners and ranks."""

import math
from collections.abc import Sequence
from typing import Literal

from pipeline.data.sources import Row
from pipeline.errors import DataError

Label = bool | int | float | str

_WINNERS: dict[str, Literal["a", "b", "tie"]] = {
    "a": "a",
    "model_a": "a",
    "b": "b",
    "model_b": "b",
    "tie": "tie",
    "tie (bothbad)": "tie",
}
_YES_OR_NO = {"true": True, "false": False, "1": True, "0": False}


def label_of(row: Row) -> Label | None:
    """The column `label` (`kto_tag` in LLaMA-Factory); None where the row has none.

    Texts that are numbers, or true and false, are these, as CSV files have them.

    Raises:
        DataError: it is a list, an object, or a number that is not finite.
    """
    name = "kto_tag" if "kto_tag" in row.columns else "label"
    if name not in row.columns:
        return None
    value = row.columns[name]
    if isinstance(value, str):
        value = _read(value.strip())
    if not isinstance(value, bool | int | float | str):
        raise DataError(
            f"{row.origin}: {name} must be the name of a class or a number, got"
            f" {type(value).__name__}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{row.origin}: {name} must be finite, got {value}")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _read(word: str) -> Label:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        number = float(word)
    except ValueError:
        return word
    return number if math.isfinite(number) else word


def tie_of(row: Row) -> bool:
    """Whether the column `tie` says that the order of two responses means nothing."""
    if "tie" not in row.columns:
        return False
    value = row.columns["tie"]
    found = _YES_OR_NO.get(str(value).strip().lower())
    if found is None:
        raise DataError(f"{row.origin}: tie must be true or false, got {value!r}")
    return found


def winner_of(row: Row) -> Literal["a", "b", "tie"]:
    """The column `winner` of a comparison: a, b (also model_a, model_b), or tie."""
    value = row.columns["winner"]
    found = _WINNERS.get(str(value).strip().lower())
    if found is None:
        raise DataError(f"{row.origin}: winner must be a, b or tie, got {value!r}")
    return found


def ranks_of(row: Row) -> list[float]:
    """The rank of each of the row's `responses`, 1 for the best; equal ranks are ties.

    They are the column `ranks`, or follow from `scores`, the higher the better.

    Raises:
        DataError: there are fewer than two responses, or not as many numbers as responses.
    """
    responses = row.columns["responses"]
    if not isinstance(responses, list) or len(responses) < 2:
        raise DataError(f"{row.origin}: responses must be a list of two or more")
    name = "ranks" if "ranks" in row.columns else "scores"
    numbers = row.columns[name]
    is_numbers = isinstance(numbers, list) and all(
        isinstance(each, int | float) and not isinstance(each, bool) and math.isfinite(each)
        for each in numbers
    )
    if not is_numbers or len(numbers) != len(responses):
        raise DataError(
            f"{row.origin}: {name} must be a list of {len(responses)} numbers, one for each"
            " response"
        )
    worth = [-each for each in numbers] if name == "scores" else numbers
    return [1.0 + sum(other < each for other in worth) for each in worth]


def best_first(ranks: Sequence[float]) -> list[int]:
    """The places of ranks, the best first, equal ones in their order."""
    return sorted(range(len(ranks)), key=lambda place: ranks[place])
