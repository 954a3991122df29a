"""Settings of the optimizer, its learning-rate schedule, and fp16's loss scale.

A schedule maps p, the completed fraction of the steps after warm-up, from 0 to 1, to a fraction of
the peak rate `optim.lr`. Steps skipped for non-finite gradients do not count.
"""

import inspect
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from pipeline.system.errors import ConfigError, require, suggestion

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]


def constant(_progress: float) -> float:
    """The peak rate (transformers' constant_with_warmup)."""
    return 1.0


def linear(progress: float) -> float:
    """1 - p (transformers)."""
    return 1.0 - progress


def cosine(progress: float, *, num_cycles: Positive = 0.5) -> float:
    """(1 + cos(2 pi num_cycles p)) / 2: by default half a wave, from 1 to 0 (transformers)."""
    return 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))


def cosine_with_restarts(progress: float, *, num_cycles: Count = 1) -> float:
    """(1 + cos(pi (num_cycles p mod 1))) / 2, and 0 at the end (transformers).

    The rate falls `num_cycles` times from 1 to 0 and jumps back in between (SGDR, Loshchilov and
    Hutter 2017).
    """
    if progress >= 1.0:
        return 0.0
    return 0.5 * (1.0 + math.cos(math.pi * ((num_cycles * progress) % 1.0)))


def polynomial(progress: float, *, power: Positive = 1.0) -> float:
    """(1 - p)^power; transformers' lr_end is `final_lr_ratio` times the peak rate."""
    return (1.0 - progress) ** power


SCHEDULES: Mapping[str, Callable[..., float]] = {
    "linear": linear,
    "cosine": cosine,
    "cosine_with_restarts": cosine_with_restarts,
    "polynomial": polynomial,
    "constant": constant,
    "constant_with_warmup": constant,
}
"""Functions by the name in `optim.schedule`."""

WITHOUT_FINAL_RATIO = ("constant", "constant_with_warmup")
"""Schedules that ignore `final_lr_ratio`."""


def check_schedule_params(schedule: str, given: Mapping[str, Any]) -> None:
    """Raise unless `given` are parameters of the schedule, of the right type and in range.

    Raises:
        ConfigError: a parameter is unknown, has the wrong type or is out of range.
    """
    known = schedule_params(schedule)
    for name, value in given.items():
        setting = f"optim.schedule_params.{name}"
        if name not in known:
            hint = suggestion(name, known)
            raise ConfigError(f"{setting} is not a parameter of the schedule {schedule}; {hint}")
        try:
            TypeAdapter(known[name], config=ConfigDict(strict=True)).validate_python(value)
        except ValidationError as error:
            expected = error.errors()[0]["msg"].removeprefix("Input should ")
            raise ConfigError(f"{setting} must {expected}, got {value}") from None


def schedule_params(schedule: str) -> dict[str, Any]:
    """Keyword-only parameters of a schedule, with their annotated types."""
    function = SCHEDULES[schedule]
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    return {each.name: hints[each.name] for each in parameters if each.kind is each.KEYWORD_ONLY}


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, AdamW (Loshchilov and Hutter 2019), and its learning-rate schedule."""

    lr: float = 1e-5
    """Peak learning rate (learning_rate), reached after the warm-up."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of Adam's first and second moment."""

    eps: float = 1e-8
    """Added to Adam's denominator."""

    weight_decay: float = 0.0
    """Decoupled weight decay; biases, norms and other one-dimensional weights are exempt."""

    moments: Literal["fp32", "bf16"] = "fp32"
    """How AdamW keeps its two moments between steps: fp32, 8 bytes for each trained weight; or
    bf16, 4. The step itself is in fp32."""

    schedule: str = "cosine"
    """Learning-rate schedule (lr_scheduler_type): linear, cosine, cosine_with_restarts, polynomial,
    constant or constant_with_warmup as in transformers. Formulas: `pipeline/config/optim.py`."""

    schedule_params: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Parameters of the schedule, if it has any: `{"power": 2}` with polynomial."""

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

    def lr_share(self, step: int, *, total_steps: int) -> float:
        """Fraction of the peak learning rate at applied step `step` (from 0).

        A linear warm-up, then the schedule, stretched to end at `final_lr_ratio`. The warm-up is
        one step ahead of transformers': its first step uses 1 / W of the peak, not 0.
        """
        warmup = self.warmup_steps
        if warmup is None:
            warmup = math.ceil(self.warmup_ratio * total_steps)
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        share = SCHEDULES[self.schedule](progress, **self.schedule_params)
        return self.final_lr_ratio + (1.0 - self.final_lr_ratio) * share

    def __post_init__(self) -> None:
        require(self.lr > 0, f"optim.lr must be above 0, got {self.lr}")
        require(
            all(0 <= beta < 1 for beta in self.betas),
            f"optim.betas must be in [0, 1), got {self.betas}",
        )
        require(self.eps > 0, f"optim.eps must be above 0, got {self.eps}")
        require(
            self.weight_decay >= 0,
            f"optim.weight_decay must not be below 0: {self.weight_decay}",
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
            f"optim.warmup_steps must not be below 0, got {self.warmup_steps}",
        )
        require(
            self.final_lr_ratio == 0 or self.schedule not in WITHOUT_FINAL_RATIO,
            f"optim.final_lr_ratio must be 0: the schedule {self.schedule} ignores it",
        )
        check_schedule_params(self.schedule, self.schedule_params)
        require(
            self.max_grad_norm is None or self.max_grad_norm > 0,
            f"optim.max_grad_norm must be above 0 or null, got {self.max_grad_norm}",
        )


DEFAULT_OPTIM = OptimConfig()
"""The optimizer of a model without its own settings; a step may replace it by its default."""


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Loss scaling of fp16, with DeepSpeed's names; no effect in other precisions."""

    loss_scale: float = 0.0
    """A fixed factor of the loss; 0 uses dynamic loss scaling."""

    initial_scale_power: int = 16
    """The dynamic scale starts at 2 to this power."""

    loss_scale_window: int = 1000
    """Consecutive good steps, after the first one, that double the dynamic scale."""

    hysteresis: int = 2
    """Overflow at which the dynamic scale is halved: by default the second, then every further one
    until the scale is doubled again."""

    consecutive_hysteresis: bool = False
    """Count only consecutive overflows: every good step resets the count of `hysteresis`."""

    min_loss_scale: float = 1.0
    """The dynamic scale never falls below this; another overflow there ends the training."""

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
            f"fp16.loss_scale_window must be above 0, got {self.loss_scale_window}",
        )
        require(self.hysteresis > 0, f"fp16.hysteresis must be above 0, got {self.hysteresis}")
        require(
            self.loss_scale > 0 or 0 < self.min_loss_scale <= self.initial_scale,
            "fp16.min_loss_scale must be above 0 and at most the initial scale,"
            f" {self.initial_scale:g}, got {self.min_loss_scale}",
        )

    @property
    def initial_scale(self) -> float:
        """The loss scale of the first step."""
        return float(self.loss_scale or 2.0**self.initial_scale_power)
