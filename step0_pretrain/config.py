"""Settings of step 0."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from pipeline.config import (
    EMBEDDED,
    OptimConfig,
    StepConfig,
    TextDataConfig,
    TrainedModelConfig,
    Workload,
)
from pipeline.system.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(StepConfig):
    """Step 0: continued pre-training on all tokens of a text corpus."""

    section: ClassVar[str] = "pretrain"

    reads_dialogues: ClassVar[bool] = False

    OPTIONS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **{
            name: fields
            for name, fields in StepConfig.OPTIONS.items()
            if not fields[0].startswith("data")
        },
        "actor_zero_stage": ("model.zero_stage",),
    }

    SINGLE_STEP_OPTIONS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        name: StepConfig.OPTIONS[name] for name in ("data_path", "data_seed", "max_length")
    }
    """Data options of train.py that apply to this step only if it runs alone."""

    output_dir: Path = Path("output/step0_pretrain")

    data: TextDataConfig = field(default_factory=TextDataConfig)

    model: TrainedModelConfig = field(
        default_factory=lambda: TrainedModelConfig(
            path=EMBEDDED, optim=OptimConfig(lr=5e-5, weight_decay=0.1)
        )
    )

    warm_start: Path | None = None
    """Directory of an earlier run of this step, whose newest checkpoint provides the weights and
    the optimizer's state for training with different data, lengths or batch sizes; null starts
    with only the weights of `model.path`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parallel.check_model("model", self.model)

    def workload(self, world: int) -> Workload:
        """Return the workload of training one language model on full rows."""
        return self.workload_of_rows(self.model, world)

    def check_corpus(self) -> None:
        """Check that the data paths name a corpus, and that `warm_start` contains checkpoints.

        Raises:
            DataError: there is no corpus.
            ConfigError: `warm_start` contains no checkpoints.
        """
        from pipeline.data.store.corpus import find_paths

        find_paths(self.data)
        if self.warm_start is not None and not any(self.warm_start.glob("checkpoints/step_*")):
            raise ConfigError(
                f"warm_start {self.warm_start} has no checkpoints; pass the output of step 0,"
                " such as OUT/step0_pretrain, or set model.path to load only the weights"
            )
