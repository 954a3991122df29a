"""Learning-rate schedules: functions of the step, and nothing else.

`step` counts the optimizer steps that were applied, from 0: one that was skipped for a non-finite
gradient does not move a schedule, as in DeepSpeed. What comes back is a share of the peak rate
`optim.lr`. Keyword arguments are what `optim.schedule_params` may hold; pydantic checks their types
and ranges.
"""

import functools
import inspect
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from pipeline.errors import ConfigError, suggestion

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Ratio = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
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


def one_cycle(
    step: int,
    span: Span,  # noqa: ARG001
    *,
    cycle_min_ratio: Ratio = 0.1,
    cycle_first_step_size: Count = 2000,
    cycle_second_step_size: CountOrZero | None = None,
    cycle_first_stair_count: CountOrZero = 0,
    cycle_second_stair_count: CountOrZero | None = None,
    decay_step_size: CountOrZero = 0,
    decay_lr_rate: NotNegative = 0.0,
) -> float:
    """DeepSpeed's OneCycle (Smith 2018): up to the peak, down again, then a slow decay.

    low + (1 - low) s, where s rises from 0 to 1 over the first half and falls to 0 over the second,
    in stairs where a count of them is given; the second half is as the first where not given. d
    steps after the cycle: low / (1 + decay_lr_rate d / decay_step_size), or low where that size
    is 0.
    """
    cycle = _cycle(cycle_first_step_size, cycle_second_step_size)
    if step < sum(cycle):
        stairs = _cycle(cycle_first_stair_count, cycle_second_stair_count)
        return cycle_min_ratio + (1.0 - cycle_min_ratio) * _height(step, cycle, stairs)
    if decay_step_size == 0:
        return float(cycle_min_ratio)
    return cycle_min_ratio / (1.0 + decay_lr_rate * (step - sum(cycle)) / decay_step_size)


def one_cycle_momentum(
    step: int,
    *,
    cycle_momentum: bool = True,
    cycle_min_mom: BelowOne = 0.8,
    cycle_max_mom: BelowOne = 0.9,
    cycle_first_step_size: Count = 2000,
    cycle_second_step_size: CountOrZero | None = None,
    cycle_first_stair_count: CountOrZero = 0,
    cycle_second_stair_count: CountOrZero | None = None,
) -> float | None:
    """The first of Adam's betas under `one_cycle`: high - (high - low) s, then high.

    It is lowest where the rate is highest. None where `cycle_momentum` is off. DeepSpeed starts the
    first step at the lowest momentum, against the formula, and sets the second beta to 0.99; here
    the formula holds from the start and the second beta is left alone.
    """
    if not cycle_momentum:
        return None
    cycle = _cycle(cycle_first_step_size, cycle_second_step_size)
    stairs = _cycle(cycle_first_stair_count, cycle_second_stair_count)
    height = _height(step, cycle, stairs) if step < sum(cycle) else 0.0
    return float(cycle_max_mom) - (cycle_max_mom - cycle_min_mom) * height


def lr_range_test(
    step: int,
    span: Span,  # noqa: ARG001
    *,
    step_size: Count = 2000,
    step_rate: NotNegative = 1.0,
    staircase: bool = False,
) -> float:
    """DeepSpeed's LRRangeTest (Smith 2018): 1 + step_rate step / step_size, without an end.

    With `staircase` step / step_size is rounded down. `optim.lr` is the lowest rate here.
    """
    return 1.0 + step_rate * (step // step_size if staircase else step / step_size)


def noam(step: int, span: Span) -> float:
    """BMTrain's Noam (Vaswani et al. 2017): step / W^1.5 in the warm-up, then 1 / sqrt(step).

    The rate peaks at `optim.lr` / sqrt(W).
    """
    if step < span.warmup_steps:
        return step / span.warmup_steps**1.5
    return 1.0 / math.sqrt(max(1, step))


def exponential(step: int, span: Span, *, gamma: Ratio = 0.95) -> float:
    """BMTrain's Exponential: step / W in the warm-up, then gamma^(step - W)."""
    if step < span.warmup_steps:
        return step / span.warmup_steps
    return float(gamma) ** (step - span.warmup_steps)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule and which of the common settings it heeds."""

    share: Callable[..., float]
    """Takes the step, a Span and parameters; gives the share of the peak rate."""

    momentum: Callable[..., float | None] | None = None
    """Takes the step and parameters; gives the momentum where the schedule moves that too."""

    has_warmup: bool = True
    """It heeds `warmup_steps` and `warmup_ratio`."""

    has_final_ratio: bool = False
    """It heeds `final_lr_ratio`."""


SCHEDULES = {
    "linear": Schedule(share=linear, has_final_ratio=True),
    "cosine": Schedule(share=cosine, has_final_ratio=True),
    "cosine_with_restarts": Schedule(share=cosine_with_restarts, has_final_ratio=True),
    "polynomial": Schedule(share=polynomial, has_final_ratio=True),
    "constant": Schedule(share=constant),
    "constant_with_warmup": Schedule(share=constant),
    "warmup": Schedule(share=warmup),
    "warmup_decay": Schedule(share=warmup_decay),
    "warmup_cosine": Schedule(share=warmup_cosine, has_final_ratio=True),
    "one_cycle": Schedule(share=one_cycle, momentum=one_cycle_momentum, has_warmup=False),
    "lr_range_test": Schedule(share=lr_range_test, has_warmup=False),
    "noam": Schedule(share=noam),
    "exponential": Schedule(share=exponential),
}
"""By the name that `optim.schedule` gives them."""


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
    """The parameters that a schedule takes, with their annotated types."""
    found: dict[str, Any] = {}
    for function in (SCHEDULES[schedule].share, SCHEDULES[schedule].momentum):
        if function is not None:
            hints = typing.get_type_hints(function, include_extras=True)
            found |= {name: hints[name] for name in keyword_only(function)}
    return found


@functools.cache
def keyword_only(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the arguments that can only be given by name."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)


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


def _cycle(first: int, second: int | None) -> tuple[int, int]:
    return first, first if second is None else second


def _height(step: int, cycle: tuple[int, int], stairs: tuple[int, int]) -> float:
    """Height of a cycle at `step`, from 0 at its ends to 1 at its top."""
    rising = step <= cycle[0]
    distance, length = (step, cycle[0]) if rising else (sum(cycle) - step, cycle[1])
    count = stairs[0] if rising else stairs[1]
    return (distance * count // length) / count if count else distance / length
