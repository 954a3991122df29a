"""Settings of sampling and of the model that generates."""

from dataclasses import dataclass, fields

from pipeline.config import Precision
from pipeline.system.errors import require


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Sampling settings without the seed, for commands that set one separately."""

    max_new_tokens: int = 128
    """Maximum number of tokens per response."""

    min_new_tokens: int = 0
    """Minimum number of tokens per response; stop tokens are not sampled before that."""

    temperature: float = 0.7
    """Divides the logits before sampling; 0 selects greedy decoding."""

    top_k: int | None = None
    """Sample from this number of most likely tokens; null uses all."""

    top_p: float = 1.0
    """Sample from the most likely tokens that together have this probability (nucleus sampling)."""

    min_p: float = 0.0
    """Minimum probability of a sampled token, relative to that of the most likely token."""

    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that occurred before and multiplies the negative ones;
    1 disables it."""

    def __post_init__(self) -> None:
        is_min_valid = 0 <= self.min_new_tokens <= self.max_new_tokens
        for name, is_valid, rule in (
            ("max_new_tokens", self.max_new_tokens > 0, "be positive"),
            ("min_new_tokens", is_min_valid, "be in [0, max_new_tokens]"),
            ("temperature", self.temperature >= 0, "be at least 0"),
            ("top_p", 0 < self.top_p <= 1, "be in (0, 1]"),
            ("top_k", self.top_k is None or self.top_k > 0, "be positive"),
            ("min_p", 0 <= self.min_p <= 1, "be in [0, 1]"),
            ("repetition_penalty", self.repetition_penalty > 0, "be positive"),
        ):
            require(is_valid, f"{name} must {rule}, got {getattr(self, name)}")

    def sampling(self, seed: int) -> "Sampling":
        """Return these settings with the seed."""
        names = [field.name for field in fields(SamplingOptions)]
        return Sampling(seed=seed, **{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class ModelOptions(SamplingOptions):
    """Settings of a command that loads a model and samples from it."""

    path: str = ""
    """Model directory (such as OUT/step3_ppo/actor), output directory of a run, or Hub id."""

    method: str | None = None
    """Method whose model is loaded from a run's output directory: ppo, grpo, ..."""

    precision: Precision = "auto"
    """Data type of the weights: auto (bf16 on a GPU that supports it, otherwise fp32), fp32, bf16
    or fp16."""

    threads: int | None = None
    """Number of CPU threads; null uses RLHF_THREADS, or one per core if that is not set."""

    def __post_init__(self) -> None:
        require(bool(self.path), "--path is missing: pass a model, such as OUT/step3_ppo/actor")
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class Sampling(SamplingOptions):
    """Sampling settings with the seed."""

    seed: int = 0
    """The same seed gives the same responses."""
