"""Loss scaling for fp16 (Micikevicius et al. 2018, section 3.2), step for step as DeepSpeed's."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.config import LossScaleConfig


@dataclass
class LossScaler:
    """The factor that keeps small fp16 gradients from vanishing.

    A step whose gradients overflow is skipped and costs one of `hysteresis` tokens; when only one
    is left, every overflow halves the scale. After one good step, each `loss_scale_window` more in
    a row double the scale and refill the tokens. With `enabled` off the scale stays 1, and a static
    one stays what it is; the engine skips non-finite steps all the same.
    """

    enabled: bool
    config: LossScaleConfig = field(default_factory=LossScaleConfig)
    scale: float = field(init=False)
    good_steps: int = field(init=False, default=0)
    """Since the last overflow."""

    tokens: int = field(init=False)
    """Overflows until the scale is halved; at 1 the next one does it."""

    exhausted: bool = field(init=False, default=False)
    """True if the last step overflowed at the lowest scale."""

    def __post_init__(self) -> None:
        self.scale = self.config.initial_scale if self.enabled else 1.0
        self.tokens = self.config.hysteresis

    @property
    def searching(self) -> bool:
        """True if an overflow leads to a smaller scale."""
        return self.enabled and not self.config.loss_scale and not self.exhausted

    def update(self, *, finite: bool) -> None:
        """Record whether the step's gradients were finite."""
        if not self.enabled or self.config.loss_scale:
            return
        self.exhausted = False
        if finite:
            window = self.config.loss_scale_window
            window_done = self.good_steps > 0 and self.good_steps % window == 0
            if window_done:
                self.scale *= 2
            if window_done or self.config.consecutive_hysteresis:
                self.tokens = self.config.hysteresis
            self.good_steps += 1
            return
        self.good_steps = 0
        if self.tokens > 1:
            self.tokens -= 1
            return
        lowest = float(self.config.min_loss_scale)
        self.exhausted = self.scale <= lowest
        self.scale = max(self.scale / 2, lowest)

    def state_dict(self) -> dict[str, float | int | bool]:
        """The state for `load_state_dict`."""
        return {name: getattr(self, name) for name in ("enabled", "scale", "good_steps", "tokens")}

    def load_state_dict(self, state: Mapping[str, float | int | bool]) -> None:
        """Restore the scale and the counts of a `state_dict`.

        A static scale stays as it is set. The state of a scaler that was off, of a run in another
        precision, says nothing of fp16: the search begins at the configured initial scale.
        """
        if not self.enabled or self.config.loss_scale:
            return
        self.exhausted = False
        if state["enabled"]:
            self.scale = float(state["scale"])
            self.good_steps = int(state["good_steps"])
            self.tokens = int(state["tokens"])
        else:
            self.__post_init__()
            self.good_steps = 0
