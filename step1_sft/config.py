"""Settings of step 1."""

from dataclasses import dataclass, field
from pathlib import Path

from pipeline.config import EMBEDDED, OptimConfig, StepConfig, TrainedModelConfig
from pipeline.errors import require


@dataclass(frozen=True, kw_only=True)
class SFTConfig(StepConfig):
    """Step 1: supervised fine-tuning."""

    output_dir: Path = Path("output/step1_sft")

    model: TrainedModelConfig = field(
        default_factory=lambda: TrainedModelConfig(
            path=EMBEDDED, optim=OptimConfig(lr=1e-5, weight_decay=0.0)
        )
    )

    patience: int | None = None
    """Stop after this many evaluations without a better perplexity; null never stops early."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.patience is None or self.patience > 0,
            f"patience must be above 0 or null, got {self.patience}",
        )
        require(
            self.patience is None or self.eval_every != 0,
            "patience counts evaluations: eval_every must not be 0",
        )
