"""How answers are drawn."""

from dataclasses import dataclass

from pipeline.config import require


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are drawn from a model."""

    max_new_tokens: int = 128
    """Longest answer, in tokens."""

    temperature: float = 0.7
    """Divides the logits before sampling; 0 takes the likeliest token (greedy)."""

    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this probability (nucleus sampling)."""

    seed: int = 0
    """The same seed gives the same answers."""

    def __post_init__(self) -> None:
        require(self.max_new_tokens > 0, f"max_new_tokens must be above 0: {self.max_new_tokens}")
        require(self.temperature >= 0, f"temperature must be 0 or above: {self.temperature}")
        require(0 < self.top_p <= 1, f"top_p must lie in (0, 1]: {self.top_p}")
