"""Prompts of a data path for commands that answer them, and sampled responses as episodes."""

import logging
from collections.abc import Mapping

from inference.files.responses import TextResponse
from pipeline.config import EMBEDDED, DataConfig, RowColumns
from pipeline.data.examples import Example
from pipeline.data.rows.reading import RowReader, Wanted
from pipeline.data.sharing.steps import load_examples
from pipeline.errors import DataError
from rewards.contract import Episode

logger = logging.getLogger(__name__)


def read_prompts(
    path: str,
    columns: RowColumns,
    *,
    fields: Mapping[str, str],
    limit: int | None,
    seed: int,
    held_out: bool = False,
) -> list[Example]:
    """The rows of a data path that have a prompt, with the columns that sources of rewards read.

    Args:
        path: as `--data-path` takes it.
        columns: to keep.
        fields: names of columns that stand for others.
        limit: rows at most.
        seed: of the order of the embedded task's rows.
        held_out: take the rows that no step trains on, where the path has any.

    Raises:
        DataError: they can't be read, or none has a prompt.
    """
    if path == EMBEDDED:
        kept = RowColumns(all=True)
        parts = load_examples(DataConfig(), step=3, seed=seed, kept=kept)
        examples = parts.eval if held_out else parts.train
    else:
        notes: list[str] = []
        (rows,) = RowReader().read((path,), Wanted(fields, columns), step=3, notes=notes)
        for note in notes:
            logger.info("%s", note)
        chosen = (rows.eval or rows.train) if held_out else rows.train
        examples = [example for example in chosen if example.prompt]
    if not examples:
        raise DataError(f"--prompts {path}: no row has a prompt")
    return examples[:limit]


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
