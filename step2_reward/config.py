"""Settings of step 2."""

from dataclasses import dataclass, field
from pathlib import Path

from pipeline.config import FrozenModelConfig, OptimConfig, StepConfig, TrainedModelConfig
from pipeline.errors import require


@dataclass(frozen=True, kw_only=True)
class RewardConfig(StepConfig):
    """Step 2: the reward model."""

    output_dir: Path = Path("output/step2_reward")

    model: TrainedModelConfig = field(
        default_factory=lambda: TrainedModelConfig(optim=OptimConfig(lr=1e-5))
    )
    """Where the reward model starts; a null path starts from step 1's weights."""

    actor: FrozenModelConfig = field(default_factory=FrozenModelConfig)
    """Step 1's model: its responses to the prompts set the zero and the unit of the score."""

    margin: bool = False
    """Subtract the data's margin inside the loss (Touvron et al. 2023, eq. 2)."""

    center_coef: float = 0.0
    """Weight of (score_chosen + score_rejected)^2, which keeps scores near 0."""

    normalization_prompts: int = 64
    """Prompts step 1's model answers to measure the mean and standard deviation of the score."""

    max_new_tokens: int = 256
    """Longest response when measuring the score's mean and standard deviation, in tokens; as in
    step 3, since answers that have not ended by then don't count."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.center_coef >= 0, f"center_coef must not be below 0, got {self.center_coef}")
        require(
            self.normalization_prompts > 1,
            f"normalization_prompts must be above 1, got {self.normalization_prompts}",
        )
        require(self.max_new_tokens > 0, f"max_new_tokens must be above 0: {self.max_new_tokens}")
