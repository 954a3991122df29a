"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, section 3.2)."""

from dataclasses import dataclass


@dataclass
class LossScaler:
    """The factor that keeps small fp16 gradients from vanishing.

    A step whose gradients overflow is skipped and halves the scale; `window` good steps in a row
    double it. With `enabled` off the scale stays 1, and a non-finite step is still skipped.
    """

    enabled: bool
    scale: float = 65536.0
    window: int = 1000
    good_steps: int = 0

    def __post_init__(self) -> None:
        if not self.enabled:
            self.scale = 1.0

    def update(self, *, finite: bool) -> None:
        """Record whether the step's gradients were finite."""
        if not self.enabled:
            return
        if not finite:
            self.scale = max(1.0, self.scale / 2)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps % self.window == 0:
            self.scale *= 2
