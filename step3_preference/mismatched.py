"""Prompts with another row's response, by which KTO estimates how far the actor has moved."""

from collections.abc import Sequence

from pipeline.data.examples import Encoded
from step3_preference.config import PreferenceConfig
from step3_preference.rows import Row, RowBatch, cut, response_start


def mismatched_batches(rows: Sequence[Row], config: PreferenceConfig) -> list[RowBatch]:
    """This process's micro-batches of all rows' prompts with mismatched responses."""
    return cut([Row(each, None) for each in mismatched(rows, config.data.max_length)], config)


def mismatched(rows: Sequence[Row], max_length: int) -> list[Encoded]:
    """For each row its prompt with the response of the next one that has another prompt.

    The order of the rows is that of the whole step, whatever micro-batches it is cut into: an
    offset within these would make the estimate depend on the cut, and a reversal would leave the
    row in the middle with its own response. Where all rows have one prompt a row keeps its own
    response. What is too long loses the beginning of the prompt.
    """
    sides = [row.sequences[0] for row in rows]
    starts = [response_start(side) for side in sides]
    prompts = [side.input_ids[:start] for side, start in zip(sides, starts, strict=True)]
    found: list[Encoded] = []
    for row, prompt in enumerate(prompts):
        others = ((row + offset) % len(rows) for offset in range(1, len(rows)))
        other = next((each for each in others if prompts[each] != prompt), row)
        response, begin = sides[other], starts[other]
        found.append(
            Encoded(
                prompt + response.input_ids[begin:],
                [False] * len(prompt) + response.trained[begin:],
            ).tail(max_length)
        )
    return found
