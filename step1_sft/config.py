"""Settings of step 1."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from evaluation.config import TaskSettings, check_tasks
from pipeline.config import (
    EMBEDDED,
    EarlyStopping,
    OptimConfig,
    StepConfig,
    TrainedModelConfig,
    Workload,
)
from pipeline.system.errors import DataError, require


@dataclass(frozen=True, kw_only=True)
class SFTConfig(TaskSettings, EarlyStopping):
    """Step 1: supervised fine-tuning."""

    section: ClassVar[str] = "sft"

    OPTIONS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **StepConfig.OPTIONS,
        "actor_zero_stage": ("model.zero_stage",),
    }

    output_dir: Path = Path("output/step1_sft")

    model: TrainedModelConfig = field(
        default_factory=lambda: TrainedModelConfig(
            path=EMBEDDED, optim=OptimConfig(lr=1e-5, weight_decay=0.0)
        )
    )

    distill_weight: float = 0.0
    """Weight of KL(teacher || student) in the loss, 0 to 1; the rest is the weight of the negative
    log-likelihood. Above 0, training rows must be those of inference.generate --top-logprobs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tasks(self)
        self.parallel.check_model("model", self.model)
        weight = self.distill_weight
        require(0 <= weight <= 1, f"sft.distill_weight must be in [0, 1], got {weight}")
        require(
            weight == 0 or self.data.train_on == "assistant",
            "sft.distill_weight trains on a teacher's responses: set data.train_on to assistant",
        )

    def choose_rows(self, train: list[Any], held_out: list[Any]) -> tuple[list[Any], list[Any]]:
        """Keep the teacher's distributions only for training, and only if the loss uses them.

        Raises:
            DataError: the loss uses them, but a row has none, or fewer tokens than another row.
        """
        held_out = [replace(row, teacher=None) if row.teacher else row for row in held_out]
        if self.distill_weight == 0:
            return [replace(row, teacher=None) if row.teacher else row for row in train], held_out
        sizes = [row.teacher.top_ids.shape[1] if row.teacher else 0 for row in train]
        if (least := min(sizes)) < max(*sizes, 1):
            raise DataError(
                f"{train[sizes.index(least)].origin}: the response has {least or 'no'} top_logprobs"
                " per token, but sft.distill_weight needs the same number, at least 1, in all"
                " training rows; create them with `python -m inference.generate --top-logprobs K`"
            )
        return train, held_out

    def workload(self, world: int) -> Workload:
        """Return the workload of training one language model on full rows."""
        work = self.workload_of_rows(self.model, world)
        return replace(work, compares_logits=self.distill_weight > 0)
