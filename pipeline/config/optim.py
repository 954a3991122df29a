"""Settings of the optimizer, its learning-rate schedule, and fp16's loss scale.

A schedule maps p, the completed fraction of the steps after warm-up, from 0 to 1, to a fraction of
the peak rate `optim.lr`. Steps skipped for non-finite gradients do not count.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from pipeline.system.errors import require, suggestion


def constant(_progress: float) -> float:
    """Return 1: the rate stays at its peak, as with transformers' constant_with_warmup."""
    return 1.0


def linear(progress: float) -> float:
    """Decay linearly from 1 to 0, as in transformers."""
    return 1.0 - progress


def cosine(progress: float) -> float:
    """Decay from 1 to 0 over half a cosine period, (1 + cos(pi p)) / 2, as in transformers."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


SCHEDULES: Mapping[str, Callable[[float], float]] = {
    "linear": linear,
    "cosine": cosine,
    "cosine_with_restarts": cosine,
    "polynomial": linear,
    "constant": constant,
    "constant_with_warmup": constant,
}
"""Schedules by their name in `optim.schedule`. As in DeepSpeed-Chat, cosine_with_restarts has one
cycle and polynomial has the power 1, which are the defaults of transformers."""

IGNORE_FINAL_RATIO = ("constant", "constant_with_warmup")
"""Schedules that ignore `final_lr_ratio`."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, AdamW (Loshchilov and Hutter 2019), and its learning-rate schedule."""

    lr: float = 1e-5
    """Peak learning rate (learning_rate), reached after the warm-up."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of Adam's first and second moments."""

    eps: float = 1e-8
    """Term added to Adam's denominator for numerical stability."""

    weight_decay: float = 0.0
    """Decoupled weight decay; biases, norms and other one-dimensional weights are exempt."""

    moments: Literal["fp32", "bf16"] = "fp32"
    """Data type in which AdamW stores its two moments between steps: fp32 takes 8 bytes per trained
    weight, bf16 takes 4. The step itself is computed in fp32."""

    schedule: str = "cosine"
    """Learning-rate schedule (lr_scheduler_type): linear, cosine, cosine_with_restarts, polynomial,
    constant or constant_with_warmup as in transformers, with their default parameters."""

    warmup_steps: int | None = None
    """Steps of the warm-up to `lr` (num_warmup_steps, warmup_num_steps); null uses
    `warmup_ratio`."""

    warmup_ratio: float = 0.03
    """Fraction of the steps spent in the warm-up."""

    final_lr_ratio: float = 0.0
    """The schedule ends at this fraction of `lr` (cos_min_ratio), if it is linear, cosine,
    cosine_with_restarts or polynomial."""

    max_grad_norm: float | None = 1.0
    """Clip the global gradient L2 norm to this value; null turns clipping off."""

    def lr_factor(self, step: int, *, total_steps: int) -> float:
        """Return the fraction of the peak learning rate at applied step `step`, counted from 0.

        A linear warm-up precedes the schedule, which is scaled to end at `final_lr_ratio`. The
        warm-up, of W steps, starts at 1 / W of the peak: it is one step ahead of transformers'.
        """
        warmup = self.warmup_steps
        if warmup is None:
            warmup = math.ceil(self.warmup_ratio * total_steps)
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        factor = SCHEDULES[self.schedule](progress)
        return self.final_lr_ratio + (1.0 - self.final_lr_ratio) * factor

    def __post_init__(self) -> None:
        require(self.lr > 0, f"optim.lr must be positive, got {self.lr}")
        require(
            all(0 <= beta < 1 for beta in self.betas),
            f"optim.betas must be in [0, 1), got {self.betas}",
        )
        require(self.eps > 0, f"optim.eps must be positive, got {self.eps}")
        require(
            self.weight_decay >= 0,
            f"optim.weight_decay must be at least 0, got {self.weight_decay}",
        )
        require(
            0 <= self.warmup_ratio < 1,
            f"optim.warmup_ratio must be in [0, 1), got {self.warmup_ratio}",
        )
        require(
            0 <= self.final_lr_ratio <= 1,
            f"optim.final_lr_ratio must be in [0, 1], got {self.final_lr_ratio}",
        )
        require(
            self.schedule in SCHEDULES,
            f"optim.schedule {self.schedule} is not a schedule;"
            f" {suggestion(self.schedule, SCHEDULES)}",
        )
        require(
            self.warmup_steps is None or self.warmup_steps >= 0,
            f"optim.warmup_steps must be at least 0, got {self.warmup_steps}",
        )
        require(
            self.final_lr_ratio == 0 or self.schedule not in IGNORE_FINAL_RATIO,
            f"optim.final_lr_ratio must be 0: the {self.schedule} schedule ignores it",
        )
        require(
            self.max_grad_norm is None or self.max_grad_norm > 0,
            f"optim.max_grad_norm must be positive or null, got {self.max_grad_norm}",
        )


DEFAULT_OPTIM = OptimConfig()
"""The optimizer of a model without its own settings; a step may replace it with its own default."""


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Loss scaling of fp16, with DeepSpeed's names; no effect in other precisions."""

    loss_scale: float = 0.0
    """Fixed loss scale; 0 uses dynamic loss scaling."""

    initial_scale_power: int = 16
    """The dynamic scale starts at 2 to this power."""

    loss_scale_window: int = 1000
    """Consecutive steps without overflow, not counting the first, after which the scale doubles."""

    hysteresis: int = 2
    """Number of the overflow that first halves the dynamic scale; each further one halves it again.
    Counting starts anew when the scale is doubled."""

    consecutive_hysteresis: bool = False
    """Count only consecutive overflows: a step without overflow resets the `hysteresis` count."""

    min_loss_scale: float = 1.0
    """The dynamic scale never falls below this value; an overflow at this value stops training."""

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.loss_scale) and self.loss_scale >= 0,
            f"fp16.loss_scale must be a finite number, 0 or above, got {self.loss_scale}",
        )
        require(
            0 <= self.initial_scale_power <= 127,
            "fp16.initial_scale_power must be in [0, 127], the exponents of fp32, got"
            f" {self.initial_scale_power}",
        )
        require(
            self.loss_scale_window > 0,
            f"fp16.loss_scale_window must be positive, got {self.loss_scale_window}",
        )
        require(self.hysteresis > 0, f"fp16.hysteresis must be positive, got {self.hysteresis}")
        require(
            self.loss_scale > 0 or 0 < self.min_loss_scale <= self.initial_scale,
            "fp16.min_loss_scale must be positive and at most the initial scale,"
            f" {self.initial_scale:g}, got {self.min_loss_scale}",
        )

    @property
    def initial_scale(self) -> float:
        """The loss scale of the first step."""
        return float(self.loss_scale or 2.0**self.initial_scale_power)
