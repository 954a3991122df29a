"""Settings of a corpus: which texts a step reads that learns from no dialogues."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.config.data import DataConfig
from pipeline.errors import require


@dataclass(frozen=True, kw_only=True)
class TextDataConfig(DataConfig):
    """Texts of the step, and how they become sequences."""

    path: tuple[str, ...] = ()
    """Token files (Megatron's .bin and .idx, or their common prefix; Modalities' .pbin), or text to
    be packed first (.jsonl, also .gz, and .txt); names may have `*`, and each may end in `:weight`,
    its share of the mixture."""

    eval_path: tuple[str, ...] = ()
    """Texts for evaluation, as `path`; empty holds out documents of `path`."""

    eval_fraction: float = 0.01
    """Share of the documents held out for evaluation where `eval_path` is empty."""

    seed: int = 0
    """Decides which documents are held out (data_seed). It has nothing to do with the seed of
    training."""

    max_eval_rows: int = 256
    """At most this many sequences of `max_length` are evaluated."""

    packing: Literal["windows", "documents"] = "windows"
    """Rows: windows takes `max_length` tokens of the texts one after the other, in which
    no document sees another; documents takes a whole document, or a piece of `max_length` of a
    longer one."""

    field: str = "text"
    """The field of each row of .jsonl files that holds its text."""

    max_length: int = 512
    """Tokens of a row (sequence_length, max_seq_len)."""

    # What only dialogues have; not settings here.
    split: tuple[float, float, float] = dataclasses.field(init=False, default=(1.0, 0.0, 0.0))
    fields: dict[str, str] = dataclasses.field(init=False, default_factory=dict[str, str])
    format: str = dataclasses.field(init=False, default="plain")
    template_args: dict[str, bool | int | float | str] = dataclasses.field(
        init=False, default_factory=dict[str, Any]
    )
    template_date: str = dataclasses.field(init=False, default="2026-01-01")
    train_on: Literal["assistant", "all"] = dataclasses.field(init=False, default="all")
    history: str = dataclasses.field(init=False, default="all")
    labels: bool = dataclasses.field(init=False, default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.field), "data.field names no field; give the one that holds the text")

    def check_path(self) -> None:
        """Nothing: a step that does not run needs no corpus."""
