"""The model that is exported."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ModelError
from pipeline.models.directory import ADAPTER, check_configuration, check_model_directory
from pipeline.report.find_model import find_model


@dataclass(frozen=True)
class Source:
    """A directory with a model."""

    directory: Path

    settings: dict[str, Any]
    """What its config.json says."""

    @property
    def is_classifier(self) -> bool:
        """Whether it is a reward model or another classifier."""
        kinds = self.settings.get("architectures") or ()
        return any(kind.endswith("ForSequenceClassification") for kind in kinds)

    @property
    def kind(self) -> str:
        """The kind of model, in words."""
        what = "classifier" if self.is_classifier else "language model"
        return f"{self.settings['model_type']} {what}"


def find_directory(path: str, method: str | None) -> Path:
    """The directory that `path` means: itself, or of a run the furthest actor's.

    Raises:
        ModelError: it is not a directory, or a run without a model.
    """
    directory = Path(find_model(path, method)).expanduser()
    if not directory.is_dir():
        raise ModelError(f"no such model: {directory} is not a directory; give that of a model")
    return directory


def read_source(directory: Path) -> Source:
    """The model in `directory`.

    Raises:
        ModelError: it holds none, or an adapter alone.
    """
    if (directory / ADAPTER).is_file() and not (directory / "config.json").is_file():
        raise ModelError(
            f"{directory} holds an adapter; merge it with --to merged, and export the result"
        )
    check_model_directory(directory)
    return Source(directory, check_configuration(directory))
