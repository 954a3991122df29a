"""The model to export, and the target directory."""

import importlib.util
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.files.durable import check_writable, discard, rename_durably, sync_tree
from pipeline.models.hf.directory import (
    ADAPTER,
    TOKENIZER_FILES,
    check_configuration,
    check_model_directory,
    is_sequence_classifier,
)
from pipeline.report.results import find_model
from pipeline.system.errors import ConfigError, ModelError


@dataclass(frozen=True)
class Source:
    """A directory with a model."""

    directory: Path

    settings: dict[str, Any]
    """The content of its config.json."""

    @property
    def is_classifier(self) -> bool:
        """Whether the model is a reward model or another classifier."""
        return is_sequence_classifier(self.settings.get("architectures"))

    @property
    def kind(self) -> str:
        """A short description of the kind of model."""
        task = "classifier" if self.is_classifier else "language model"
        return f"{self.settings['model_type']} {task}"


def find_directory(path: str, method: str | None) -> Path:
    """Return the directory `path`, or the last actor's directory if `path` is a run.

    Raises:
        ModelError: `path` is not a directory, or is a run without a model.
    """
    directory = Path(find_model(path, method)).expanduser()
    if not directory.is_dir():
        raise ModelError(f"no such model: {directory} is not a directory; pass a model directory")
    return directory


def read_source(directory: Path) -> Source:
    """Read the model in `directory`.

    Raises:
        ModelError: there is no model, or only an adapter.
    """
    if (directory / ADAPTER).is_file() and not (directory / "config.json").is_file():
        raise ModelError(
            f"{directory} contains an adapter; merge it with --to merged, and export the result"
        )
    check_model_directory(directory)
    return Source(directory, check_configuration(directory))


def copy_settings(source: Path, directory: Path) -> None:
    """Copy the settings, tokenizer and chat template of a model."""
    for pattern in ("config.json", "generation_config.json", "*.jinja", *TOKENIZER_FILES):
        for file in source.glob(pattern):
            shutil.copyfile(file, directory / file.name)


def require_packages(names: Sequence[str]) -> None:
    """Raise ConfigError if a package from the `export` extra is missing."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f'package {missing[0]} is missing; run pip install "rlhf-pipeline[export]"'
        )


def check_export_directory(out: Path) -> None:
    """Check that an export can be written to `out`.

    Raises:
        ConfigError: `out` is a file or a nonempty directory, or is not writable.
    """
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists():
        raise ConfigError(f"--out {out} already exists; remove it, or choose another directory")
    check_writable(out, option="--out")


@contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """Yield a temporary directory; rename it to `out` if the block ends without an error.

    Until then it is `<out>.partial`; an error, or the next call after a killed process, removes it.

    Raises:
        ConfigError: the disk is full, or the directory is not writable.
    """
    partial = out.with_name(f"{out.name}.partial")
    try:
        discard(partial)
        partial.mkdir(parents=True)
        yield partial
        sync_tree(partial)
        rename_durably(partial, out)
    except OSError as error:
        discard(partial)
        reason = error.strerror or error
        raise ConfigError(f"--out {out} can't be written: {reason}") from error
    except BaseException:
        discard(partial)
        raise
