"""Learning-rate schedules: functions of the step, and nothing else.

`step` counts the optimizer steps that were applied, from 0: one that was skipped for a non-finite
gradient does not move a schedule, as in DeepSpeed. What comes back is a share of the peak rate
`optim.lr`. Keyword arguments are what `optim.schedule_params` may hold; pydantic checks their types
and ranges.
"""

import inspect
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from pipeline.errors import ConfigError, suggestion

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(gt=0)]
CountOrZero = Annotated[int, Field(ge=0)]
WarmupType = Literal["log", "linear"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """The length of a schedule."""

    total_steps: int
    """Optimizer steps of the whole run, the warm-up included."""

    warmup_steps: int

    final_ratio: float
    """Share of the peak rate at the end."""


def constant(step: int, span: Span) -> float:
    """The peak rate after the warm-up (transformers' constant_with_warmup)."""
    return _warmed_up(step, span, lambda _: 1.0)


def linear(step: int, span: Span) -> float:
    """1 - p, where p is the share of the steps after the warm-up that are done (transformers)."""
    return _warmed_up(step, span, lambda progress: 1.0 - progress)


def cosine(step: int, span: Span, *, num_cycles: Positive = 0.5) -> float:
    """(1 + cos(2 pi num_cycles p)) / 2: by default half a wave, from 1 to 0 (transformers)."""
    return _warmed_up(
        step,
        span,
        lambda progress: 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress)),
    )


def cosine_with_restarts(step: int, span: Span, *, num_cycles: Count = 1) -> float:
    """(1 + cos(pi (num_cycles p mod 1))) / 2, and 0 at the end (transformers).

    The rate falls `num_cycles` times from 1 to 0 and jumps back in between (SGDR, Loshchilov and
    Hutter 2017).
    """

    def shape(progress: float) -> float:
        if progress >= 1.0:
            return 0.0
        return 0.5 * (1.0 + math.cos(math.pi * ((num_cycles * progress) % 1.0)))

    return _warmed_up(step, span, shape)


def polynomial(step: int, span: Span, *, power: Positive = 1.0) -> float:
    """(1 - p)^power; transformers' lr_end is `final_ratio` times the peak rate."""
    return _warmed_up(step, span, lambda progress: (1.0 - progress) ** power)


def warmup(
    step: int, span: Span, *, warmup_type: WarmupType = "log", warmup_min_ratio: Ratio = 0.0
) -> float:
    """DeepSpeed's WarmupLR: from the lowest rate to the peak, where it stays.

    low + (1 - low) g(t) with W = max(2, warm-up steps); g(t) = log(t + 1) / log(W), or t / W where
    linear, and 1 from t = W on. DeepSpeed advances a schedule after the step, so that t = step - 1
    and the first two steps use the lowest rate.
    """
    rise = _rise(step - 1, span, warmup_type)
    return warmup_min_ratio + (1.0 - warmup_min_ratio) * (1.0 if rise is None else rise)


def warmup_decay(
    step: int,
    span: Span,
    *,
    warmup_type: WarmupType = "log",
    warmup_min_ratio: Ratio = 0.0,
    total_num_steps: CountOrZero = 0,
) -> float:
    """DeepSpeed's WarmupDecayLR: `warmup`, then a straight line back to the lowest rate.

    After the warm-up g(t) = max(0, (T - t) / max(1, T - W)), with T = `total_num_steps`, or the
    run's steps where that is 0.
    """
    total = total_num_steps or span.total_steps
    share = _rise(step - 1, span, warmup_type)
    if share is None:
        share = max(0.0, (total - (step - 1)) / max(1, total - _deepspeed_warmup(span)))
    return warmup_min_ratio + (1.0 - warmup_min_ratio) * share


def warmup_cosine(
    step: int,
    span: Span,
    *,
    warmup_type: WarmupType = "log",
    warmup_min_ratio: Ratio = 0.0,
    total_num_steps: CountOrZero = 0,
) -> float:
    """DeepSpeed's WarmupCosineLR: `warmup`, then half a cosine wave down to `final_ratio`.

    After the warm-up f + (1 - f) (1 + cos(pi min(1, (step - W) / max(1, T - W)))) / 2, where f is
    DeepSpeed's cos_min_ratio. Its first step has a rate of 0, whatever `warmup_min_ratio` says.
    """
    if step == 0:
        return 0.0
    rise = _rise(step - 1, span, warmup_type)
    if rise is not None:
        return warmup_min_ratio + (1.0 - warmup_min_ratio) * rise
    warmup_steps = _deepspeed_warmup(span)
    total = total_num_steps or span.total_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total - warmup_steps))
    shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    return span.final_ratio + (1.0 - span.final_ratio) * shape


SCHEDULES: Mapping[str, Callable[..., float]] = {
    "linear": linear,
    "cosine": cosine,
    "cosine_with_restarts": cosine_with_restarts,
    "polynomial": polynomial,
    "constant": constant,
    "constant_with_warmup": constant,
    "warmup": warmup,
    "warmup_decay": warmup_decay,
    "warmup_cosine": warmup_cosine,
}
"""By the name in `optim.schedule`: share of the peak rate at a step, for a Span and parameters."""

WITHOUT_FINAL_RATIO = ("constant", "constant_with_warmup", "warmup", "warmup_decay")
"""Schedules that ignore `final_lr_ratio`."""


def check_schedule_params(schedule: str, given: Mapping[str, Any]) -> None:
    """Raise unless `given` are parameters of the schedule, of the right type and in range.

    Raises:
        ConfigError: one sentence that starts with the name of the setting.
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


def _warmed_up(step: int, span: Span, shape: Callable[[float], float]) -> float:
    """A linear warm-up, then `shape` of the progress from 0 to 1, stretched to the final ratio.

    The warm-up is one step ahead of transformers': its first step uses 1 / W of the peak, not 0.
    """
    if step < span.warmup_steps:
        return (step + 1) / span.warmup_steps
    progress = (step - span.warmup_steps) / max(1, span.total_steps - span.warmup_steps)
    return span.final_ratio + (1.0 - span.final_ratio) * shape(min(1.0, progress))


def _deepspeed_warmup(span: Span) -> int:
    return max(2, span.warmup_steps)  # log(1) would be a divisor


def _rise(iteration: int, span: Span, warmup_type: str) -> float | None:
    """DeepSpeed's g(t), 0 before t = 0; None from the end of the warm-up on."""
    warmup_steps = _deepspeed_warmup(span)
    if iteration >= warmup_steps:
        return None
    iteration = max(0, iteration)
    if warmup_type == "log":
        return math.log(iteration + 1) / math.log(warmup_steps)
    return iteration / warmup_steps
