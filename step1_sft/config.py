"""Settings of step 1."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from evaluation.config import TaskSettings, check_tasks
from pipeline.config import (
    EMBEDDED,
    EarlyStopping,
    OptimConfig,
    StepConfig,
    TrainedModelConfig,
    Workload,
)


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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tasks(self)
        self.parallel.check_model("model", self.model)

    def workload(self, world: int) -> Workload:
        """Return the workload of training one language model on full rows."""
        return self.workload_of_rows(self.model, world)
