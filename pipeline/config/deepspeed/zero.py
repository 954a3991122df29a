"""ZeRO stage, offload and the engine's other settings from a DeepSpeed file."""

from typing import Any

from pipeline.config.deepspeed.values import Values

STAGES = (0, 1, 2, 3)
_ZERO = "zero_optimization."
TRAVEL = "communication_data_type"


def zero_settings(values: Values) -> dict[str, Any]:
    """`zero_stage` and `zero.*`, as far as the file sets them."""
    settings: dict[str, Any] = {}
    stage = values.choice(_ZERO + "stage", STAGES)
    if stage is not None:
        settings["zero_stage"] = stage
    elif values.under("zero_optimization"):
        settings["zero_stage"] = stage = 0
    settings |= _offload(values, stage or 0)
    prefetch = _ZERO + "stage3_prefetch_bucket_size"
    if not values.is_auto(prefetch) and values.whole(prefetch) == 0:
        settings["zero.prefetch_units"] = 0
    if values.choice(TRAVEL, ("fp32", "bf16", "bfp16")) in ("bf16", "bfp16"):
        settings["zero.reduce_dtype"] = "bf16"
    switches = [values.flag(f"compile.{name}") for name in ("deepcompile", "enabled")]
    if any(switch is not None for switch in switches):
        settings["zero.compile"] = any(switches)
    return settings


def _offload(values: Values, stage: int) -> dict[str, Any]:
    optimizer = _device(values, "offload_optimizer", old="cpu_offload")
    params = _device(values, "offload_param", old="cpu_offload_param")
    if params not in (None, "none") and stage != 3:
        raise values.error(
            _ZERO + "offload_param", f"needs zero_optimization.stage 3, got {stage}; remove one"
        )
    settings: dict[str, Any] = {}
    if optimizer:
        settings["zero.offload.optimizer"] = optimizer
        if optimizer != "none" and stage >= 2:
            # DeepSpeed keeps reduced gradients next to the optimizer that reads them.
            settings["zero.offload.gradients"] = "cpu"
    if params:
        settings["zero.offload.params"] = params
    path = _nvme_path(values, {"offload_optimizer": optimizer, "offload_param": params})
    if path:
        settings["zero.offload.nvme_path"] = path
    pinned = _pin_memory(values)
    if pinned is not None:
        settings["zero.offload.pin_memory"] = pinned
    return settings


def _device(values: Values, section: str, *, old: str) -> str | None:
    device = values.choice(f"{_ZERO}{section}.device", ("none", "cpu", "nvme"))
    deprecated = values.flag(_ZERO + old)
    if deprecated is None:
        return device
    if device is not None:
        raise values.error(
            _ZERO + old, f"says the same as zero_optimization.{section}; keep the latter"
        )
    return "cpu" if deprecated else "none"


def _nvme_path(values: Values, devices: dict[str, str | None]) -> str | None:
    """The one directory for all that is offloaded to disk."""
    paths: dict[str, str] = {}
    for section, device in devices.items():
        if device != "nvme":
            continue
        key = f"{_ZERO}{section}.nvme_path"
        path = values.text(key)
        if path is None:
            raise values.error(
                f"{_ZERO}{section}.device",
                f"is nvme: {key} must name a directory on a fast local disk",
            )
        paths[key] = path
    if len(set(paths.values())) > 1:
        (first, one), (second, other) = paths.items()
        raise values.error(first, f"is {one} and {second} is {other}; use one directory for both")
    return next(iter(paths.values()), None)


def _pin_memory(values: Values) -> bool | None:
    keys = (
        "offload_optimizer.pin_memory",
        "offload_param.pin_memory",
        "cpu_offload_use_pin_memory",
    )
    given = {_ZERO + key: values.flag(_ZERO + key) for key in keys}
    given = {key: pinned for key, pinned in given.items() if pinned is not None}
    if len(set(given.values())) > 1:
        first, *others = given
        raise values.error(first, f"contradicts {' and '.join(others)}; use one value for all")
    return next(iter(given.values()), None)
