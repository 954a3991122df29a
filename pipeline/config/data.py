"""Settings of the data: location, use by steps, conversion to tokens."""

import ast
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.system.errors import require

EMBEDDED = "embedded"
"""As a model path, the embedded Llama and its tokenizer; as a data path, the embedded task."""


@dataclass(frozen=True)
class RowColumns:
    """Columns of rows that a step reads in addition to the dialogue, such as the correct answer."""

    needed: frozenset[str] = frozenset()
    """Columns that at least one row must have."""

    all: bool = False
    """Whether every column is kept."""

    labels: bool = False
    """Whether the step trains on `label`."""

    known_labels: bool = False
    """Whether step 2 trains on `label`, which tells other steps which rows they can use."""

    def select(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the columns that the step reads and the row has."""
        names = self.needed | (columns.keys() if self.all else set())
        values = {name: find_column(columns, name) for name in sorted(names)}
        return {name: value for name, value in values.items() if value is not None}


def find_column(columns: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401
    """Return the value of column `name`, of a nested OUTER.INNER or of verl's INNER, or None."""
    nested = (_parse_nested(columns.get(outer)) for outer in ("reward_model", "extra_info"))
    values = (_get_entry(source, name) for source in (columns, *nested))
    return next((value for value in values if value is not None), None)


def _get_entry(source: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401
    outer, _, inner = name.partition(".")
    value = source.get(name)
    return _get_entry(_parse_nested(source.get(outer)), inner) if value is None and inner else value


def _parse_nested(value: object) -> Mapping[str, Any]:
    """Return `value` as a mapping, parsed if it is text as in CSV files, or {} for other values."""
    is_text = isinstance(value, str) and value.lstrip().startswith("{")
    value = parse_literal(value) if is_text else value
    return value if isinstance(value, Mapping) else {}


def parse_literal(value: Any) -> Any:  # noqa: ANN401
    """Parse text that is JSON or a Python literal; return anything else unchanged."""
    for parse in (json.loads, ast.literal_eval) if isinstance(value, str) else ():
        try:
            return parse(value.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return value


RowUse = Literal["demonstrations", "pairs", "labels", "prompts", "responses"]
"""The part of a row that a step reads: a response to imitate; a better and a worse response; pairs,
labels or ranked responses; the prompt; or single responses marked as good or bad."""


@dataclass(frozen=True)
class RowShare:
    """The rows that a step uses, if they differ from the default for its number."""

    use: RowUse

    split_steps: tuple[int, ...]
    """Steps whose parts of `data.split` are used."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Rows of a step, and how they are converted to tokens."""

    path: tuple[str, ...] = (EMBEDDED,)
    """Local .json, .jsonl, .csv, .tsv (all also .gz) or .parquet files, directories, or Hub names
    (data_path); each may end in `@split`, a split of the data set, and `:weight`, its share of the
    mixture. `embedded` is the built-in task."""

    eval_path: tuple[str, ...] = ()
    """Rows for evaluation; if empty, the test split or `eval_fraction` of `path` is held out."""

    eval_fraction: float = 0.1
    """Fraction of the prompts held out for evaluation if `eval_path` is empty."""

    seed: int = 0
    """Seed that decides which prompts are held out and which step gets each of the others
    (data_seed). It is independent of the training seed, and must be the same in all steps."""

    max_eval_rows: int = 256
    """Maximum number of evaluation rows; prompts that are too long are not counted."""

    split: tuple[float, float, float] = (2.0, 4.0, 4.0)
    """Proportions of the prompts for steps 1, 2 and 3, which share no prompt (data_split)."""

    fields: dict[str, str] = field(default_factory=dict)
    """Column names if they differ from the usual ones: `{"prompt": "question", "chosen":
    "good"}`."""

    format: str = "auto"
    """Chat format: auto (the tokenizer's own template, else human_assistant), tokenizer,
    human_assistant, chatml, llama2, llama3, plain, or a path to a Jinja file."""

    template_args: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Arguments of the chat template: `{"enable_thinking": false}` (chat_template_kwargs). They are
    saved with the model."""

    train_on: Literal["assistant", "all"] = "assistant"
    """Tokens included in the loss: assistant turns only, or the whole dialogue."""

    max_length: int = 512
    """Maximum tokens in prompt and response (max_seq_len). Longer rows are truncated at the end in
    step 1, and at the beginning in step 2, which scores the last token; step 3 has other limits."""

    labels: bool = False
    """Whether step 2 trains on the column `label`, which determines how prompts are assigned to
    steps; train.py sets this for all steps."""

    def __post_init__(self) -> None:
        self.check_path()
        require(
            0 < self.eval_fraction < 1,
            f"data.eval_fraction must be above 0 and below 1, got {self.eval_fraction}",
        )
        require(
            self.max_eval_rows > 0, f"data.max_eval_rows must be positive, got {self.max_eval_rows}"
        )
        check_split("data.split", self.split)
        require(self.max_length > 1, f"data.max_length must be above 1, got {self.max_length}")

    def check_path(self) -> None:
        """Raise `ConfigError` if no data path is given."""
        require(bool(self.path), "data.path is empty; set it to a file, directory or Hub name")


def check_split(name: str, split: Sequence[float]) -> None:
    """Raise `ConfigError`, prefixed with `name`, unless the rows can be split this way."""
    require(
        all(part >= 0 and math.isfinite(part) for part in split) and sum(split) > 0,
        f"{name} needs three proportions of 0 or more that are not all 0, such as 2,4,4; got"
        f" {','.join(f'{part:g}' for part in split)}",
    )


@dataclass(frozen=True, kw_only=True)
class TextDataConfig(DataConfig):
    """Texts of the step, and how they are divided into sequences."""

    path: tuple[str, ...] = ()
    """Token files (Megatron's .bin and .idx, or their common prefix); names may contain `*`, and
    each may end in `:weight`, its share of the mixture."""

    eval_fraction: float = 0.01
    """Fraction of the documents held out for evaluation."""

    seed: int = 0
    """Seed that decides which documents are held out (data_seed); not the training seed."""

    max_eval_rows: int = 256
    """Maximum number of sequences of `max_length` to evaluate."""

    max_length: int = 512
    """Tokens per row (sequence_length, max_seq_len)."""

    # Fields of dialogues only, which are not settings here.
    eval_path: tuple[str, ...] = dataclasses.field(init=False, default=())
    split: tuple[float, float, float] = dataclasses.field(init=False, default=(1.0, 0.0, 0.0))
    fields: dict[str, str] = dataclasses.field(init=False, default_factory=dict[str, str])
    format: str = dataclasses.field(init=False, default="plain")
    template_args: dict[str, bool | int | float | str] = dataclasses.field(
        init=False, default_factory=dict[str, Any]
    )
    train_on: Literal["assistant", "all"] = dataclasses.field(init=False, default="all")
    labels: bool = dataclasses.field(init=False, default=False)

    def check_path(self) -> None:
        """Do nothing: a step that does not run needs no corpus."""
