"""Answers that a model gave to prompts, as episodes that sources of rewards score."""

from inference.files.responses import TextResponse
from pipeline.data.examples import Example
from rewards.contract import Episode


def episode_of(example: Example, answer: TextResponse, slot: int) -> Episode:
    """An answer to the prompt of a row, whose columns the sources read."""
    return Episode(
        prompt=example.prompt,
        response=answer.text,
        extra=example.extra,
        stopped=answer.stop != "length",
        num_tokens=len(answer.token_ids),
        slot=slot,
    )
