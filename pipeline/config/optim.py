"""Settings of the optimizer, its schedule and fp16's loss scale.

The engine updates flat pieces of the weights, so optimizers must be element-wise.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.config.schedules import SCHEDULES, WITHOUT_FINAL_RATIO, check_schedule_params
from pipeline.errors import ConfigError, require, suggestion

ELEMENT_WISE = (
    "AdamW",
    "Adam",
    "SGD",
    "Adagrad",
    "RMSprop",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adadelta",
    "ASGD",
    "Rprop",
)
"""Classes of torch.optim that update every weight from its own gradient and state alone."""

NOT_ELEMENT_WISE = {
    "LBFGS": "it evaluates the loss several times in a step",
    "Muon": "it orthogonalizes whole matrices",
    "Adafactor": "it keeps statistics of the rows and columns of whole matrices",
    "SparseAdam": "it takes sparse gradients only",
    "Lamb": "it needs the norms of whole layers",
    "FusedLamb": "it needs the norms of whole layers",
    "OneBitLamb": "it needs the norms of whole layers and compresses what processes exchange",
    "OneBitAdam": "it compresses what processes exchange",
    "ZeroOneAdam": "it compresses what processes exchange",
}
"""Classes that are refused, by name, and why."""

OWN_SETTINGS = ("lr", "betas", "eps", "weight_decay")

ENGINES_OWN = ("params", "capturable", "differentiable")


def check_optimizer(name: str, params: Mapping[str, Any]) -> None:
    """Raise unless `name` is an element-wise class of torch.optim that takes `params`.

    Raises:
        ConfigError: one sentence that starts with the name of the setting.
    """
    reasons = {each.lower(): why for each, why in NOT_ELEMENT_WISE.items()}
    if name.lower() in reasons:
        raise ConfigError(
            f"optim.name can't be {name}: {reasons[name.lower()]}, and the engine updates flat"
            " pieces of the weights; use AdamW or another element-wise class of torch.optim"
        )
    if name not in ELEMENT_WISE:
        hint = suggestion(name, ELEMENT_WISE)
        raise ConfigError(f"optim.name {name} is not an element-wise class of torch.optim; {hint}")
    if params:
        _check_params(name, params)


def _check_params(name: str, params: Mapping[str, Any]) -> None:
    import torch

    optimizer_class = getattr(torch.optim, name)
    known = set(inspect.signature(optimizer_class).parameters) - {*OWN_SETTINGS, *ENGINES_OWN}
    for param in params:
        setting = f"optim.params.{param}"
        if param in OWN_SETTINGS:
            raise ConfigError(f"{setting} is a setting of its own: optim.{param}")
        if param in ENGINES_OWN:
            raise ConfigError(f"{setting} is the engine's own; leave it out")
        if param not in known:
            raise ConfigError(f"{setting} is not an argument of {name}; {suggestion(param, known)}")
    try:
        optimizer_class([torch.zeros(1, requires_grad=True)], **params)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"optim.params: torch's {name} refuses them: {error}") from None


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    name: str = "AdamW"
    """Element-wise class of torch.optim: AdamW, Adam, SGD, Adagrad, RMSprop, NAdam, RAdam, Adamax,
    Adadelta, ASGD or Rprop."""

    params: dict[str, bool | int | float | str | list[float]] = field(default_factory=dict)
    """Further arguments of that class: `{"momentum": 0.9, "nesterov": true}` with SGD."""

    lr: float = 1e-5
    """Peak learning rate (learning_rate), reached after the warm-up."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of Adam's first and second moment, for the classes that have them."""

    eps: float = 1e-8
    """Added to Adam's denominator, and to that of the other classes that have it."""

    weight_decay: float = 0.0
    """Weight decay, decoupled in AdamW, an L2 penalty in the other classes; biases, norms and other
    one-dimensional weights are exempt."""

    moments: Literal["fp32", "bf16", "8bit"] = "fp32"
    """How AdamW keeps its two moments between steps: fp32, 8 bytes for each trained weight; bf16,
    4; 8bit, 2.06, in blocks of 32 with an exponent each, rounded so that the mean is right. The
    step itself is in fp32."""

    schedule: str = "cosine"
    """Course of the learning rate (lr_scheduler_type): linear, cosine, cosine_with_restarts,
    polynomial, constant or constant_with_warmup as in transformers; warmup, warmup_decay or
    warmup_cosine as in DeepSpeed. `pipeline/config/schedules.py` has the formulas."""

    schedule_params: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Parameters of the schedule where it has any: `{"power": 2}` with polynomial."""

    warmup_steps: int | None = None
    """Steps of the warm-up to `lr` (num_warmup_steps, warmup_num_steps); null takes
    `warmup_ratio`."""

    warmup_ratio: float = 0.03
    """Share of the steps spent in the warm-up."""

    final_lr_ratio: float = 0.0
    """The schedule ends at this share of `lr` (cos_min_ratio), where it is linear, cosine,
    cosine_with_restarts, polynomial or warmup_cosine."""

    max_grad_norm: float | None = 1.0
    """Clip the global gradient L2 norm to this value; null turns clipping off."""

    def __post_init__(self) -> None:
        check_optimizer(self.name, self.params)
        require(
            self.weight_decay == 0 or self.name != "Rprop",
            f"optim.weight_decay must be 0: Rprop has none, got {self.weight_decay}",
        )
        require(
            self.moments == "fp32" or (self.name == "AdamW" and not self.params),
            f"optim.moments {self.moments} is AdamW's without optim.params; {self.name}"
            f"{' with optim.params' if self.params else ''} keeps its state in fp32",
        )
        require(self.lr > 0, f"optim.lr must be above 0, got {self.lr}")
        require(
            all(0 <= beta < 1 for beta in self.betas),
            f"optim.betas must lie in [0, 1), got {self.betas}",
        )
        require(self.eps > 0, f"optim.eps must be above 0, got {self.eps}")
        require(
            self.weight_decay >= 0, f"optim.weight_decay must not be below 0: {self.weight_decay}"
        )
        require(
            0 <= self.warmup_ratio < 1,
            f"optim.warmup_ratio must lie in [0, 1), got {self.warmup_ratio}",
        )
        require(
            0 <= self.final_lr_ratio <= 1,
            f"optim.final_lr_ratio must lie in [0, 1], got {self.final_lr_ratio}",
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
    """Loss scaling of fp16, in DeepSpeed's words; no effect in other precisions."""

    loss_scale: float = 0.0
    """A fixed factor of the loss; 0 finds one as it goes (dynamic loss scaling)."""

    initial_scale_power: int = 16
    """The dynamic scale starts at 2 to this power."""

    loss_scale_window: int = 1000
    """Good steps in a row, after the first one, that double the dynamic scale."""

    hysteresis: int = 2
    """The overflow that halves the dynamic scale: the second by default, then every further one
    until the scale is doubled again."""

    consecutive_hysteresis: bool = False
    """Count only overflows in a row: every good step starts the count of `hysteresis` again."""

    min_loss_scale: float = 1.0
    """The dynamic scale never falls below this; a further overflow there stops the training."""

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.loss_scale) and self.loss_scale >= 0,
            f"fp16.loss_scale must be a finite number, 0 or above, got {self.loss_scale}",
        )
        require(
            0 <= self.initial_scale_power <= 127,
            "fp16.initial_scale_power must lie in [0, 127], the powers of 2 that fp32 holds, got"
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
        """The factor of the first step."""
        return float(self.loss_scale or 2.0**self.initial_scale_power)
