"""The options of `python -m pipeline.data.store`."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.config import DataConfig
from pipeline.errors import require

OF_DIALOGUES = ("fields", "format", "template_args", "template_date", "train_on", "history")
"""Settings that dialogues are rendered by, in `pack` as in step 1."""


@dataclass(frozen=True, kw_only=True)
class WritingConfig:
    """What every command needs that writes a token file, or another program's."""

    out: Path | None = None
    """The file to write, of Megatron's two the name without .bin; refused where it is there."""

    def __post_init__(self) -> None:
        require(self.out is not None, "out is missing; give the file to write")

    @property
    def target(self) -> Path:
        """`out`, which is there."""
        assert self.out is not None
        return self.out


@dataclass(frozen=True, kw_only=True)
class PackConfig(WritingConfig):
    """What `pack` does."""

    tokenizer: str = ""
    """Model id or local directory of the tokenizer."""

    workers: int = 1
    """Processes that tokenize; the file is the same for any number of them."""

    rows: Literal["text", "dialogues"] = "text"
    """What rows hold: a text, of which step 0 learns every token; or dialogues in any of the forms
    that step 1 reads, with the tokens that it learns marked."""

    field: str = "text"
    """The field of each row that holds its text."""

    fields: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Of dialogues the names of columns where they differ from the usual: `{"prompt": "question"}`,
    as `data.fields` of step 1."""

    format: str = "auto"
    """Chat format of dialogues, as `data.format` of step 1."""

    template_args: dict[str, bool | int | float | str] = dataclasses.field(
        default_factory=dict[str, bool | int | float | str]
    )
    """Arguments of the chat template, as `data.template_args` of step 1."""

    template_date: str = "2026-01-01"
    """The date for chat templates that ask for it, as `data.template_date` of step 1."""

    train_on: Literal["assistant", "all"] = "assistant"
    """Tokens of dialogues that are learned, as `data.train_on` of step 1."""

    history: str = "all"
    """Turns before a response that are kept, as `data.history` of step 1."""

    on_bad_row: Literal["stop", "skip"] = "stop"
    """What a row does that can't be used: end the command, or be named, counted and left out."""

    max_row: int = 16 * 2**20
    """Longest row, in bytes; a longer one is a bad row. It takes about 80 times as much memory."""

    resume: bool = False
    """Go on where a pack was ended, if one was; the file is the same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.tokenizer), "tokenizer is missing; give its directory or model id")
        require(self.workers >= 1, f"workers must be at least 1, got {self.workers}")
        require(self.max_row >= 1, f"max_row must be at least 1, got {self.max_row}")
        given, usual = self.data, DataConfig()
        for name in OF_DIALOGUES:
            require(
                self.rows == "dialogues" or getattr(given, name) == getattr(usual, name),
                f"{name} is of dialogues: give --rows dialogues too",
            )
        require(
            self.rows == "text" or self.field == "text",
            "field is of texts; columns of dialogues are named by fields",
        )

    @property
    def data(self) -> DataConfig:
        """How dialogues become tokens, as the settings of step 1 have it."""
        return DataConfig(**{name: getattr(self, name) for name in OF_DIALOGUES})


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """What `index` writes."""

    out: Path | None = None
    """The index, whose name ends in .index; null is beside the file, as rows.jsonl.index."""

    def __post_init__(self) -> None:
        require(
            self.out is None or self.out.suffix == ".index",
            f"out must end in .index, got {self.out}",
        )


@dataclass(frozen=True, kw_only=True)
class ShowConfig:
    """What `show` prints."""

    document: int | None = None
    """Print the text and the ids of this document, counted from 0; of an index this row."""

    tokenizer: str | None = None
    """The tokenizer to decode with, where it is not where the file says."""


@dataclass(frozen=True, kw_only=True)
class MergeConfig(WritingConfig):
    """What `merge` writes."""


@dataclass(frozen=True, kw_only=True)
class ShuffleConfig(WritingConfig):
    """What `shuffle` writes."""

    seed: int = 0
    """Decides the order."""


@dataclass(frozen=True, kw_only=True)
class ChunkConfig(WritingConfig):
    """What `chunk` writes: `X-00000-of-00008.tokens` and so on of `--out X.tokens`."""

    parts: int | None = None
    """Number of parts: documents that follow one another, of nearly the same number of tokens."""

    shares: tuple[float, ...] = ()
    """Or their shares, such as 98,1,1: documents by a hash of their own tokens, so that copies of
    one are in one part."""

    part: int | None = None
    """Write this part alone, counted from 0."""

    seed: int = 0
    """Decides, with `--shares`, which document is in which part."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            (self.parts is None) != (not self.shares),
            "parts or shares is needed, and not both: --parts 8, or --shares 98,1,1",
        )
        require(
            self.parts is None or 1 < self.parts <= 256,
            f"parts must be above 1 and at most 256, got {self.parts}",
        )
        require(
            not self.shares or (len(self.shares) > 1 and min(self.shares) > 0),
            f"shares needs two numbers above 0 or more, got {list(self.shares)}",
        )
        require(
            self.part is None or 0 <= self.part < self.count,
            f"part must be one of 0 to {self.count - 1}, got {self.part}",
        )

    @property
    def count(self) -> int:
        """Number of parts."""
        return self.parts or len(self.shares)


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(WritingConfig):
    """What `convert` writes."""

    to: Literal["tokens", "megatron"] = "tokens"
    """A token file of Megatron's .bin and .idx or of Modalities' .pbin, or Megatron's of a token
    file."""

    tokenizer: str = ""
    """Model id or local directory of the tokenizer whose ids the file has; for `--to tokens`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            (self.to == "tokens") == bool(self.tokenizer),
            "tokenizer is needed with --to tokens, and with that alone",
        )


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """`verify` has no options."""
