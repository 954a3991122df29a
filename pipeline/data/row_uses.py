"""What a step reads of a row, and which rows it has a use for."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeline.config import RowColumns, RowUse
from pipeline.data.examples import Example

_USES: Mapping[int, RowUse] = {1: "demonstrations", 2: "pairs", 3: "prompts"}

NEEDS: Mapping[RowUse, str] = {
    "demonstrations": "a response (chosen, response, output, messages, ...)",
    "pairs": "a chosen and a rejected response",
    "labels": "a chosen and a rejected response, a label, ranked responses, or labelled steps",
    "prompts": "a prompt",
    "responses": "a response, chosen, rejected or with a label",
}
"""What a row must have for it."""


def uses_of(kept: RowColumns) -> Mapping[int, RowUse]:
    """What each step reads of a row, by its number, unless its share says otherwise."""
    return {**_USES, 2: "labels"} if kept.labels or kept.known_labels else _USES


def is_usable(example: Example, use: RowUse) -> bool:
    """Whether the row has what that use needs."""
    match use:
        case "demonstrations":
            return bool(example.chosen) and not example.tie and example.label is not False
        case "pairs":
            return bool(example.chosen and example.rejected) and not example.tie
        case "labels":
            is_pair = bool(example.chosen and example.rejected)
            return is_pair or example.label is not None or bool(example.steps)
        case "responses":
            return bool(example.chosen or example.rejected)
        case "prompts":
            return bool(example.prompt)


def as_used(examples: Sequence[Example], use: RowUse) -> list[Example]:
    """The examples; of pairs that are read response by response two each, side by side."""
    if use != "responses":
        return list(examples)
    return [
        each
        for example in examples
        for each in (replace(example, rejected=()), replace(example, chosen=()))
        if each.chosen or each.rejected
    ]
