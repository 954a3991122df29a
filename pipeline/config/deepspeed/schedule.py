"""Learning-rate schedule from a DeepSpeed file.

DeepSpeed's schedules name rates; ours name one, the peak `optim.lr`, and shares of it.
"""

from typing import Any

from pipeline.config.deepspeed.values import Values

DEEPSPEED_SCHEDULES = {
    "WarmupLR": "warmup",
    "WarmupDecayLR": "warmup_decay",
    "WarmupCosineLR": "warmup_cosine",
    "OneCycle": "one_cycle",
    "LRRangeTest": "lr_range_test",
}
"""DeepSpeed's schedules by our names."""

OWN_SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "noam",
    "exponential",
)
"""The other schedules of `optim.schedule`, which a file may name too, with our parameters."""

_WARMUP = ("warmup_num_steps", "warmup_type")
SCHEDULE_PARAMS = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", *_WARMUP),
    "WarmupDecayLR": ("warmup_min_lr", "warmup_max_lr", *_WARMUP, "total_num_steps"),
    "WarmupCosineLR": ("warmup_min_ratio", "cos_min_ratio", *_WARMUP, "total_num_steps"),
    "OneCycle": (
        "cycle_min_lr",
        "cycle_max_lr",
        "decay_lr_rate",
        "cycle_first_step_size",
        "cycle_second_step_size",
        "cycle_first_stair_count",
        "cycle_second_stair_count",
        "decay_step_size",
        "cycle_momentum",
        "cycle_min_mom",
        "cycle_max_mom",
        "decay_mom_rate",
    ),
    "LRRangeTest": (
        "lr_range_test_min_lr",
        "lr_range_test_step_size",
        "lr_range_test_step_rate",
        "lr_range_test_staircase",
    ),
}
"""The parameters of DeepSpeed's schedules."""

# What DeepSpeed's constructors take where a file says nothing.
_WARMUP_STEPS = 1000
_MAX_LR = 1e-3
_COS_MIN_RATIO = 1e-4

_KEY = "scheduler.params."


def schedule_settings(values: Values, *, lr: float | None) -> dict[str, Any]:
    """`optim.schedule` and what belongs to it, as far as the file sets it.

    Args:
        values: the file.
        lr: the optimizer's own rate in the file.
    """
    if not values.under("scheduler"):
        return {}
    given = values.text("scheduler.type")
    if values.is_auto("scheduler.type"):
        return {}  # listed with the others that nothing resolves
    if given is None:
        raise values.error("scheduler", 'needs a type, such as "WarmupLR"')
    name = _schedule_name(values, given)
    _check_params(values, name)
    if name in OWN_SCHEDULES:
        keys = [key for key in values.under("scheduler.params") if not key.endswith("iteration")]
        params = {key.removeprefix(_KEY): values.raw(key) for key in keys}
        return {"optim.schedule": name, **({"optim.schedule_params": params} if params else {})}
    if name == "OneCycle":
        settings, params = _one_cycle(values)
    elif name == "LRRangeTest":
        settings, params = _lr_range_test(values)
    else:
        settings, params = _warmup(values, name, lr=lr)
    params = {key: value for key, value in params.items() if value is not None}
    return {
        "optim.schedule": DEEPSPEED_SCHEDULES[name],
        "optim.final_lr_ratio": 0.0,
        **{key: value for key, value in settings.items() if value is not None},
        **({"optim.schedule_params": params} if params else {}),
    }


def _schedule_name(values: Values, given: str) -> str:
    known = [*DEEPSPEED_SCHEDULES, *OWN_SCHEDULES]
    return values.one_of("scheduler.type", given, known, "a schedule")


def _check_params(values: Values, name: str) -> None:
    for key in values.under("scheduler.params"):
        param = key.removeprefix(_KEY)
        known = SCHEDULE_PARAMS.get(name, (param,))
        if param == "last_batch_iteration":
            if values.raw(key) != -1:
                raise values.error(key, "can only be -1: a resumed run knows its step; remove it")
        elif param not in known:
            raise values.not_a_parameter(key, name, known)
        elif not values.is_auto(key) and isinstance(values.raw(key), list | dict):
            raise values.error(
                key, f"must be one value for all parameters, got {values.raw(key)!r}"
            )


Settings = tuple[dict[str, Any], dict[str, Any]]
"""Settings of ours by dotted name, and the schedule's own parameters."""


def _warmup(values: Values, name: str, *, lr: float | None) -> Settings:
    settings: dict[str, Any] = {"optim.warmup_steps": _warmup_steps(values)}
    params = {
        "warmup_type": values.choice(_KEY + "warmup_type", ("log", "linear")),
        "total_num_steps": _total_steps(values),
    }
    if name == "WarmupCosineLR":
        params["warmup_min_ratio"] = values.number(_KEY + "warmup_min_ratio")
        ratio = values.number(_KEY + "cos_min_ratio")
        settings["optim.final_lr_ratio"] = _COS_MIN_RATIO if ratio is None else ratio
        return settings, params
    peak = _peak(values, name, lr)
    settings["optim.lr"] = peak
    low = _KEY + "warmup_min_lr"
    if not values.is_auto(low):  # "auto" is 0
        params["warmup_min_ratio"] = _share(values, low, peak or values.given.get("optim.lr"))
    return settings, params


def _peak(values: Values, name: str, lr: float | None) -> float | None:
    key = _KEY + "warmup_max_lr"
    if values.is_auto(key) and lr is not None:
        return lr
    peak = values.number(key, "optim.lr")
    if peak is None and not values.has(key):
        return lr if name == "WarmupLR" else _MAX_LR
    return peak


def _warmup_steps(values: Values) -> int | None:
    """Steps of the warm-up; for "auto" what is known of the run, None for our own setting."""
    key = _KEY + "warmup_num_steps"
    if values.is_auto(key):
        return values.given.get("optim.warmup_steps")
    steps = values.whole(key, low=1)
    return _WARMUP_STEPS if steps is None else steps


def _total_steps(values: Values) -> int | None:
    """Steps in all; for "auto" what is known of the run, None for the run's own number."""
    key = _KEY + "total_num_steps"
    return values.given.get("total_steps") if values.is_auto(key) else values.whole(key, low=1)


def _share(values: Values, key: str, peak: float | None) -> float | None:
    """The rate `key` as a share of the peak rate."""
    rate = values.number(key)
    if not rate:
        return rate
    if peak is None:
        raise values.error(key, "is a share of the peak rate here; add optimizer.params.lr")
    if rate > peak:
        raise values.error(key, f"is {rate:g}, above the peak rate {peak:g}; lower it")
    return rate / peak


def _one_cycle(values: Values) -> Settings:
    peak = values.number(_KEY + "cycle_max_lr")
    if peak is None or not values.has(_KEY + "cycle_min_lr"):
        raise values.error("scheduler", "is OneCycle, which needs cycle_min_lr and cycle_max_lr")
    if values.number(_KEY + "decay_mom_rate"):
        raise values.error(_KEY + "decay_mom_rate", "can only be 0 here; remove it")
    return {"optim.lr": peak}, {
        "cycle_min_ratio": _share(values, _KEY + "cycle_min_lr", peak),
        "cycle_first_step_size": values.whole(_KEY + "cycle_first_step_size", low=1),
        "cycle_second_step_size": values.whole(_KEY + "cycle_second_step_size"),
        "cycle_first_stair_count": values.whole(_KEY + "cycle_first_stair_count"),
        "cycle_second_stair_count": values.whole(_KEY + "cycle_second_stair_count"),
        "decay_step_size": values.whole(_KEY + "decay_step_size"),
        "decay_lr_rate": values.number(_KEY + "decay_lr_rate"),
        "cycle_momentum": values.flag(_KEY + "cycle_momentum"),
        "cycle_min_mom": values.number(_KEY + "cycle_min_mom"),
        "cycle_max_mom": values.number(_KEY + "cycle_max_mom"),
    }


def _lr_range_test(values: Values) -> Settings:
    lowest = values.number(_KEY + "lr_range_test_min_lr", "optim.lr")
    return {"optim.lr": _MAX_LR if lowest is None else lowest}, {
        "step_size": values.whole(_KEY + "lr_range_test_step_size", low=1),
        "step_rate": values.number(_KEY + "lr_range_test_step_rate"),
        "staircase": values.flag(_KEY + "lr_range_test_staircase"),
    }
