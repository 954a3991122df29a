"""Settings of step 2, and of `python -m step2_reward.lab`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from pipeline.config import (
    EMBEDDED,
    EarlyStopping,
    ModelUse,
    OptimConfig,
    RowColumns,
    StepConfig,
    TrainedModelConfig,
    Workload,
)
from pipeline.data.examples import Example
from pipeline.system.errors import require
from step2_reward.labels import LabelSettings, detect_kind, select_rows


@dataclass(frozen=True, kw_only=True)
class RewardConfig(LabelSettings, EarlyStopping):
    """Step 2: the reward model."""

    section: ClassVar[str] = "reward"

    OPTIONS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **StepConfig.OPTIONS,
        "reward_zero_stage": ("model.zero_stage",),
    }

    output_dir: Path = Path("output/step2_reward")

    model: TrainedModelConfig = field(
        default_factory=lambda: TrainedModelConfig(optim=OptimConfig(lr=1e-5))
    )
    """The initial model; by default step 1's output."""

    margin: bool = False
    """Subtract each pair's margin from its score difference (Touvron et al. 2023, eq. 2)."""

    center_coef: float = 0.0
    """Weight of (score_chosen + score_rejected)^2, which keeps scores near 0."""

    best_by: Literal["accuracy", "loss"] = "accuracy"
    """Criterion for the best weights, on held-out rows: accuracy (correctly ordered pairs or
    correctly classified rows), or loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parallel.check_model("model", self.model)
        self.check_labels()
        require(self.center_coef >= 0, f"center_coef must be at least 0, got {self.center_coef}")

    @property
    def trains_on_labels(self) -> bool:
        """Whether the step trains on labels rather than only on pairs."""
        return self.labels != "pairs"

    @property
    def row_columns(self) -> RowColumns:
        """The label columns, or none if the step trains only on pairs."""
        return RowColumns(labels=self.trains_on_labels)

    def choose_rows(
        self, train: Sequence[Example], held_out: Sequence[Example]
    ) -> tuple[list[Example], list[Example]]:
        """Return the rows that have labels of the configured or detected kind.

        Raises:
            DataError: as in `select_rows`.
            ConfigError: a setting would have no effect on these rows.
        """
        selected, kind = select_rows(self, train, held_out), detect_kind(self, train)
        require(
            kind == "classes" or not (self.class_list or self.class_values or self.class_weights),
            "reward.class_list, class_values and class_weights are for classes, but the rows have"
            f" labels of kind {kind}; omit them, or set reward.labels to classes",
        )
        require(
            self.center_coef == 0 or kind == "pairs",
            "reward.center_coef is for pairs of responses, which the rows aren't; omit it",
        )
        require(
            not self.margin or any(row.margin for row in selected[0]),
            "reward.margin is set, but no training pair has a margin; add a column `margin`, or"
            " `score_chosen` and `score_rejected`, or omit the setting",
        )
        return selected

    @property
    def sequences_per_row(self) -> int:
        """Maximum number of dialogues per row: 2 for pairs and auto, otherwise 1."""
        known = {"classes": 1, "scalar": 1, "steps": 1}
        return known.get(self.labels, 2)

    def workload(self, world: int) -> Workload:
        """Return the workload of training a scorer on rows."""
        return Workload(
            world=world,
            parallel=self.parallel,
            models=(
                ModelUse(
                    role="model", settings=self.model, scores=True, host_copies=self.keep_best
                ),
            ),
            iteration_rows=self.batch_size,
            batch_size=self.batch_size,
            micro_batch_size=self.micro_batch_size,
            sequences_per_row=self.sequences_per_row,
            length=self.data.max_length,
            targets=self.data.max_length - 1,
        )


@dataclass(frozen=True, kw_only=True)
class LabConfig:
    """The reward model to measure, and the labeled rows used for it."""

    path: str = ""
    """The reward model: OUT/step2_reward, or any sequence classifier."""

    data_path: str = EMBEDDED
    """Labeled rows: a file, directory or Hub name, whose test split is used if there is one;
    `embedded` is the embedded task's held-out pairs."""

    fields: dict[str, str] = field(default_factory=dict)
    """Column names that differ from the usual ones, such as prompt=question label=category."""

    rows: int = 1000
    """Maximum number of rows to measure."""

    max_length: int = 512
    """Maximum number of tokens per dialogue; longer ones lose their beginning."""

    output_dir: Path | None = None
    """Directory of lab.json and predictions.jsonl; null uses `lab` in the model's directory, or in
    the current one for a model on the Hub."""

    def __post_init__(self) -> None:
        require(bool(self.path), "--path is missing: pass the directory of a reward model")
        require(self.rows > 0, f"rows must be positive, got {self.rows}")
        require(self.max_length > 1, f"max_length must be above 1, got {self.max_length}")
