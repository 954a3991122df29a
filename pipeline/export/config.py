"""Settings of `python -m pipeline.export`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.errors import ConfigError, require

Target = Literal["gguf", "onnx", "merged", "adapter"]
GgufFormat = Literal["f32", "f16", "bf16", "q8_0"]


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What is exported, in which form, and to where."""

    path: str = ""
    """Directory of a model or an adapter, or the output directory of a run, whose furthest actor it
    takes."""

    to: Target | None = None
    """Form: gguf, onnx, merged (weights with the adapter in them) or adapter (without the base)."""

    out: Path | None = None
    """Directory to make; it must not be there yet."""

    method: str | None = None
    """Of a run with several methods, the one whose actor is taken; null takes the best."""

    base: str | None = None
    """Directory of the model that an adapter changes; null takes the one that the adapter names."""

    number_format: GgufFormat = "f32"
    """Of a GGUF file's matrices: f32, f16, bf16 or q8_0."""

    cache: Literal["none", "kv"] = "none"
    """Of an ONNX file of a language model: kv takes and gives keys and values, so that a new token
    takes a pass over itself; none computes each token from the whole text."""

    texts: int = 1000
    """Texts whose tokens a GGUF file must give as the tokenizer does."""

    dry_run: bool = False
    """Say what would be written and verified, and write nothing."""

    def __post_init__(self) -> None:
        require(bool(self.path), "path is missing; give the directory of a model or a run")
        if self.to is None:
            raise ConfigError("to is missing; give gguf, onnx, merged or adapter")
        require(self.out is not None, "out is missing; give the directory to write")
        require(self.texts >= 1, f"texts must be at least 1, got {self.texts}")
        require(
            self.number_format == "f32" or self.to == "gguf",
            f"number_format {self.number_format} is for --to gguf; leave it out",
        )
        require(
            self.cache == "none" or self.to == "onnx", "cache kv is for --to onnx; leave it out"
        )
        require(
            self.base is None or self.to in ("merged", "adapter"),
            "base is for --to merged and --to adapter; merge an adapter before another export",
        )
