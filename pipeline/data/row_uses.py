"""What steps read of a row, and which rows have it."""

from collections.abc import Sequence
from dataclasses import replace

from pipeline.config import RowUse
from pipeline.data.examples import Example

USES: dict[int, RowUse] = {1: "demonstrations", 2: "pairs", 3: "prompts"}
"""By step, unless its share says otherwise."""

NEEDS: dict[RowUse, str] = {
    "demonstrations": "a response (chosen, response, output, messages, ...)",
    "pairs": "a chosen and a rejected response",
    "prompts": "a prompt",
    "responses": "a response, chosen, rejected or with a label",
}


def is_usable(example: Example, use: RowUse) -> bool:
    """Whether a step that reads this of a row can use the example."""
    match use:
        case "demonstrations":
            return bool(example.chosen)
        case "pairs":
            return bool(example.chosen and example.rejected)
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
