"""The data of a step before it runs: rows, optimizer steps, tokens of a row."""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config import EMBEDDED, DataConfig, RowColumns, RowCounts, StepConfig
from pipeline.data.examples import Example
from pipeline.data.rows.sources import PAIR_OF_FILES, is_pair_of_files
from pipeline.data.sharing.steps import StageData, load_examples, of_one_kind
from pipeline.plan.inputs import is_local, without_weight
from pipeline.plan.stage import Stage
from pipeline.system.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pipeline.data.chat.chat_format import ChatFormat

SAMPLE = 128
"""Rows that are encoded to find out how long they are."""

MOST_BYTES = 512 * 2**20
"""Of data files that are read for a plan; larger ones are left to the steps."""


@dataclass(frozen=True)
class Tokens:
    """Tokens of the training rows of a step, by a sample of them."""

    row: float
    """Mean of a row: a pair has two sequences, a prompt no response."""

    cut: float = 0.0
    """Share of the rows that are longer than the step reads."""

    seconds: float = 0.0
    """Seconds of processor time to encode a row."""


@dataclass(frozen=True)
class Preview:
    """The data of a step, as far as it is known before it begins."""

    data: StageData | None = None
    """The rows; None where they were not read, and of a corpus."""

    counts: RowCounts | None = None
    """Of the rows; None where they are not known."""

    unread: str = ""
    """The reason why they were not read."""

    seconds: float = 0.0
    """Seconds of processor time to read the rows."""

    tokens: Tokens | None = None

    def steps(self, config: StepConfig) -> int | None:
        """Optimizer steps (in step 3 iterations of rollout and update); None is not known."""
        if config.max_steps is not None or self.counts is None:
            return config.max_steps
        return math.ceil(config.epochs * self.counts.train / config.workload(1).data_rows)


def read_rows(config: StepConfig, stage: Stage, *, downloads: bool) -> Preview:
    """The rows of a step, as it will read them.

    Raises:
        DataError: a path, row, split or setting leaves the step without usable rows.
    """
    texts: DataConfig | None = getattr(config, "ptx_rows", None)
    wanted = [(config.data, stage.number, config.row_columns, config.row_share)]
    wanted += [(texts, 1, RowColumns(), None)] if texts is not None else []
    unread = _unread([path for data, *_ in wanted for path in (*data.path, *data.eval_path)])
    if unread and not (downloads and unread == ON_HUB):
        return Preview(unread=unread)
    began = time.thread_time()
    first, *_ = [
        load_examples(data, step=step, seed=config.seed, kept=kept, share=share)
        for data, step, kept, share in wanted
    ]
    data = of_one_kind(first, config)
    counts = RowCounts(train=len(data.train), held_out=len(data.eval), notes=tuple(data.notes))
    return Preview(data, counts, "", time.thread_time() - began)


def count_corpus(config: StepConfig, tokenizer: "PreTrainedTokenizerBase | None") -> Preview:
    """Preview of the corpus of a step, with the tokenizer of its model.

    Raises:
        DataError: the corpus can't be used with it.
    """
    began = time.thread_time()
    counts = config.count_rows(tokenizer)
    seconds = time.thread_time() - began
    if counts.unread:
        return Preview(unread=counts.unread, seconds=seconds)
    return Preview(counts=counts, seconds=seconds, tokens=Tokens(counts.tokens))


def check_task_rows(config: StepConfig, *, downloads: bool) -> None:
    """Read the rows of the tasks that the step's model is asked, where the plan reads such paths.

    Raises:
        DataError: they can't be read, or lack what they need.
    """
    unread = _unread(getattr(config, "eval_task_data", {}).values())
    if not unread or (downloads and unread == ON_HUB):
        config.check_task_rows()


ON_HUB = "on the Hub, read when the run begins"


def _unread(paths: Iterable[str]) -> str:
    """Why the rows of these data paths are not read for a plan; empty where they are."""
    size = 0
    for path in paths:
        bare = without_weight(path)
        if bare == EMBEDDED:
            continue
        local = Path(bare).expanduser()
        if is_pair_of_files(bare):
            files = PAIR_OF_FILES
        elif not is_local(bare):
            return ON_HUB
        else:
            files = local.rglob("*") if local.is_dir() else [local]
        size += sum(file.stat().st_size for file in files if file.is_file())
    return f"{size / 2**30:.1f} GiB, read when the run begins" if size > MOST_BYTES else ""


def count_tokens(data: StageData, config: StepConfig, chat: "ChatFormat", stage: Stage) -> Tokens:
    """The length of the training rows.

    Raises:
        DataError: a row can't be rendered in the format, or all prompts to respond to are too long.
    """
    rows = data.train[:: max(1, len(data.train) // SAMPLE)][:SAMPLE]
    work = config.workload(1)
    answers = work.generates_first and work.generation is not None
    limit = work.generation.prompt_length if answers and work.generation else work.length
    began = time.thread_time()
    if answers:
        lengths = [[len(chat.encode_prompt(row.prompt))] for row in rows]
    else:
        lengths = [_lengths(row, chat, work.sequences_per_row) for row in rows]
    seconds = (time.thread_time() - began) / len(rows)
    cut = sum(max(each) > limit for each in lengths) / len(rows)
    if not answers:
        kept = [sum(min(length, limit) for length in each) for each in lengths]
        return Tokens(sum(kept) / len(kept), cut, seconds)
    for name, examples in (("training", data.train), ("held-out", data.eval)):
        prompts = (len(chat.encode_prompt(example.prompt)) for example in examples)
        shortest = math.inf
        for length in prompts:
            shortest = min(shortest, length)
            if length <= limit:
                break
        if shortest > limit:
            raise DataError(
                f"every {name} prompt is longer than {stage.section}.max_prompt_length {limit} (the"
                f" shortest has {shortest} tokens); raise it"
            )
    short = [length for (length,) in lengths if length <= limit]
    return Tokens(sum(short) / max(1, len(short)), cut, seconds)


def _lengths(row: Example, chat: "ChatFormat", sequences: int) -> list[int]:
    """Tokens of each sequence of a row."""
    responses = row.responses or tuple(each for each in (row.chosen, row.rejected) if each)
    return [
        len(chat.encode(row.prompt, response) if response else chat.encode_prompt(row.prompt))
        for response in (responses or ((),))[:sequences]
    ]
