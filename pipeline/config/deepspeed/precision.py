"""Number format and loss scale from a DeepSpeed file."""

from typing import Any

from pipeline.config.deepspeed.values import Values

_LOWER = ("fp16", "bf16")


def precision_settings(values: Values) -> dict[str, Any]:
    """`precision` and, with fp16, `fp16.*`, as far as the file sets them."""
    precision = _precision(values)
    settings = {} if precision is None else {"precision": precision}
    if precision == "fp16":
        settings |= _loss_scale(values)
    return settings


def _precision(values: Values) -> str | None:
    """fp16, bf16, or fp32 where the file switches both off; None where it says nothing."""
    autos = [name for name in _LOWER if values.is_auto(f"{name}.enabled")]
    fixed = {
        name: values.flag(f"{name}.enabled")
        for name in _LOWER
        if name not in autos and values.has(f"{name}.enabled")
    }
    enabled = [name for name, on in fixed.items() if on]
    if len(enabled) == 2:
        raise values.error("fp16.enabled", "and bf16.enabled are both true; keep one")
    wanted = enabled[0] if enabled else None
    params = values.choice("data_types.param_dtype", (*_LOWER, "fp32"))
    if params and wanted and params != wanted:
        raise values.error(
            "data_types.param_dtype", f"is {params}, but {wanted}.enabled is true; keep one"
        )
    if wanted or params:
        return wanted or params
    found = [values.raw(f"{name}.enabled", "precision") for name in autos]
    if found:
        return found[0]
    return "fp32" if fixed else None


def _loss_scale(values: Values) -> dict[str, Any]:
    dynamic = not values.number("fp16.loss_scale")
    low = 1 if dynamic else 0
    found = {
        "loss_scale": values.number("fp16.loss_scale"),
        "initial_scale_power": values.whole("fp16.initial_scale_power"),
        "loss_scale_window": values.whole("fp16.loss_scale_window", low=low),
        "hysteresis": values.whole("fp16.hysteresis", low=low),
        "consecutive_hysteresis": values.flag("fp16.consecutive_hysteresis"),
        "min_loss_scale": _min_scale(values, dynamic=dynamic),
    }
    return {f"fp16.{name}": value for name, value in found.items() if value is not None}


def _min_scale(values: Values, *, dynamic: bool) -> float | None:
    smallest = values.number("fp16.min_loss_scale")
    if smallest == 0 and dynamic:
        raise values.error("fp16.min_loss_scale", "must be above 0, got 0")
    return smallest
