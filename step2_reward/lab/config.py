"""Settings of the laboratory."""

from dataclasses import dataclass, field
from pathlib import Path

from pipeline.config import EMBEDDED
from pipeline.errors import require


@dataclass(frozen=True, kw_only=True)
class LabConfig:
    """What to measure, on which rows."""

    path: str = ""
    """The reward model: OUT/step2_reward, or any sequence classifier."""

    data_path: str = EMBEDDED
    """Labelled rows: a file, directory or Hub name, of which the test split is taken where there is
    one; `embedded` is the built-in task's held-out pairs."""

    bench: str | None = None
    """Rows of RewardBench 2, measured instead of `data_path`: a file, directory or Hub name such as
    allenai/reward-bench-2, with `prompt`, lists `chosen` and `rejected`, and `subset`."""

    fields: dict[str, str] = field(default_factory=dict)
    """Column names where they differ from the usual: prompt=question label=category."""

    history: str = "all"
    """Of the turns before a response, what the model reads, as in `data.history`."""

    rows: int = 1000
    """Rows that are measured, at most; of `bench` all are."""

    max_length: int = 512
    """Longest dialogue in tokens; what is longer loses its beginning."""

    output_dir: Path | None = None
    """Where lab.json, predictions.jsonl and report.html go; null is `lab` in the model's directory.
    """

    actor: str | None = None
    """A model that answers the built-in task's prompts, such as OUT/step1_sft: draws the curve of
    over-optimization against the task's verifier."""

    best_of: int = 16
    """Responses that the actor samples to each prompt."""

    prompts: int = 64
    """Prompts of the built-in task that the actor answers."""

    seed: int = 1234
    """Seed of the actor's sampling."""

    def __post_init__(self) -> None:
        require(bool(self.path), "path names no model; give the directory of a reward model")
        for name in ("rows", "best_of", "prompts"):
            require(getattr(self, name) > 0, f"{name} must be above 0, got {getattr(self, name)}")
        require(self.max_length > 1, f"max_length must be above 1, got {self.max_length}")
        require(
            self.bench is None or (self.data_path == EMBEDDED and not self.fields),
            "bench takes the place of data_path and fields: leave these out, or run twice",
        )
        require(
            self.bench is None or self.actor is None,
            "actor needs data_path embedded: leave bench out, or run twice",
        )
        require(
            self.actor is None or self.data_path == EMBEDDED,
            "actor needs data_path embedded: no other rows come with a program that judges answers",
        )
