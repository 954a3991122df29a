"""Responses that are worse than they were, or no better: does the score see it?"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Encoded, Example, Message

PROBES = {
    "no_end": "its end-of-turn token removed",
    "truncated": "cut in half, and ended",
    "doubled": "repeated",
}
"""What is done to a response."""


@dataclass(frozen=True)
class Probe:
    """What a change does to scores."""

    change: float
    """Mean of the changed response's score less its own, in standard deviations of scores."""
    lower: float
    """Share of the responses that score lower with it."""
    responses: int


def probed(example: Example, chat: ChatFormat, *, max_length: int) -> dict[str, Encoded] | None:
    """The good response of a row as it is (`whole`) and changed in each way.

    None where there is no response, or where one of them is longer than is read.
    """
    if len(example.chosen) != 1 or not example.prompt:
        return None
    whole = chat.encode(example.prompt, example.chosen)
    start = len(chat.encode_prompt(example.prompt))
    response = whole.input_ids[start:]
    if len(response) < 3 or response[-1] not in chat.stop_ids:
        return None
    text = example.chosen[0].content
    half = response[: (len(response) - 1) // 2]
    found = {
        "whole": whole,
        "no_end": Encoded.untrained(whole.input_ids[:-1]),
        "truncated": Encoded.untrained([*whole.input_ids[:start], *half, response[-1]]),
        "doubled": chat.encode(example.prompt, (Message("assistant", f"{text} {text}"),)),
    }
    return found if max(map(len, found.values())) <= max_length else None


def probe(whole: Sequence[float], changed: Sequence[float], *, std: float) -> Probe:
    """What a change did, from scores before and after it."""
    changes = [after - before for before, after in zip(whole, changed, strict=True)]
    return Probe(
        change=sum(changes) / len(changes) / (std or 1.0),
        lower=sum(each < 0 for each in changes) / len(changes),
        responses=len(changes),
    )
