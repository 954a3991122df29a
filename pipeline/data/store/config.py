"""The options of `python -m pipeline.data.store`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.errors import require


@dataclass(frozen=True, kw_only=True)
class PackConfig:
    """What `pack` does."""

    tokenizer: str = ""
    """Model id or local directory of the tokenizer."""

    out: Path | None = None
    """The token file to write; refused where it is there already."""

    workers: int = 1
    """Processes that tokenize; the file is the same for any number of them."""

    field: str = "text"
    """The field of each row that holds its text."""

    on_bad_row: Literal["stop", "skip"] = "stop"
    """What a row does that can't be used: end the command, or be named, counted and left out."""

    max_row: int = 16 * 2**20
    """Longest row, in bytes; a longer one is a bad row. It takes about 80 times as much memory."""

    resume: bool = False
    """Go on where a pack was ended, if one was; the file is the same."""

    def __post_init__(self) -> None:
        require(bool(self.tokenizer), "tokenizer is missing; give its directory or model id")
        require(self.out is not None, "out is missing; give the token file to write")
        require(self.workers >= 1, f"workers must be at least 1, got {self.workers}")
        require(self.max_row >= 1, f"max_row must be at least 1, got {self.max_row}")

    @property
    def target(self) -> Path:
        """`out`, which is there."""
        assert self.out is not None
        return self.out


@dataclass(frozen=True, kw_only=True)
class ShowConfig:
    """What `show` prints."""

    document: int | None = None
    """Print the text and the ids of this document, counted from 0."""

    tokenizer: str | None = None
    """The tokenizer to decode with, where it is not where the file says."""


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """What `merge` writes."""

    out: Path | None = None
    """The token file to write; refused where it is there already."""

    def __post_init__(self) -> None:
        require(self.out is not None, "out is missing; give the token file to write")

    @property
    def target(self) -> Path:
        """`out`, which is there."""
        assert self.out is not None
        return self.out


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """What `convert` writes."""

    to: Literal["tokens", "megatron"] = "tokens"
    """A token file of Megatron's .bin and .idx or of Modalities' .pbin, or Megatron's of a token
    file."""

    out: Path | None = None
    """The token file to write, or Megatron's without .bin; refused where it is there already."""

    tokenizer: str = ""
    """Model id or local directory of the tokenizer whose ids the file has; for `--to tokens`."""

    def __post_init__(self) -> None:
        require(self.out is not None, "out is missing; give the file to write")
        require(
            (self.to == "tokens") == bool(self.tokenizer),
            "tokenizer is needed with --to tokens, and with that alone",
        )

    @property
    def target(self) -> Path:
        """`out`, which is there."""
        assert self.out is not None
        return self.out


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """`verify` has no options."""
