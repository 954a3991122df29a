"""DeepSpeed configuration files as one layer of a step's settings.

A key takes effect (`SUPPORTED`) or is ignored (`IGNORED`); any other key is refused unless its
value leaves a feature off. Key names are those of DeepSpeed 0.19; `docs/deepspeed.md` describes
them. The value "auto" leaves a setting unchanged. As in DeepSpeed, files may have comments and
trailing commas, but no duplicate keys.

Values are checked when the settings are built, so that an error names our setting and the file.
"""

import difflib
import json
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pipeline.config.model import TrainedModelConfig
from pipeline.config.parallel import ParallelConfig
from pipeline.config.step import Tracker
from pipeline.settings.build import Layer, build_config, merge
from pipeline.settings.fields import Option, section_class, unflatten
from pipeline.system.errors import ConfigError, counted, require, suggestion

AUTO = "auto"

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

FP16_KEYS = (
    *("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis"),
    *("consecutive_hysteresis", "min_loss_scale"),
)

ZERO = "zero_optimization."
OFFLOADS = {"optimizer": f"{ZERO}offload_optimizer.", "params": f"{ZERO}offload_param."}
OFFLOAD_KEYS = ("device", "nvme_path")

SUPPORTED = (
    *BATCH_KEYS,
    *("gradient_clipping", "communication_data_type"),
    *("optimizer.type", "optimizer.params", "scheduler.type", "scheduler.params"),
    *("fp16.enabled", *(f"fp16.{name}" for name in FP16_KEYS), "bf16.enabled"),
    f"{ZERO}stage",
    *(f"{prefix}{key}" for prefix in OFFLOADS.values() for key in OFFLOAD_KEYS),
    *("tensorboard.enabled", "wandb.enabled"),
)
"""Keys that take effect; `docs/deepspeed.md` lists the settings that they correspond to."""

IGNORED = (
    *("optimizer.legacy_fusion", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *("fp16.auto_cast", "bf16.auto_cast", "bf16.loss_scale*", "bf16.*hysteresis"),
    *("bf16.initial_scale_power", "bf16.min_loss_scale", "bf16.immediate_grad_update"),
    *("bf16.check_*", "data_types.grad_accum_dtype", "fp32_allreduce", "prescale_gradients"),
    *("gradient_predivide_factor", "sparse_gradients", "disable_allgather", "graph_harvesting"),
    *("use_data_before_expert_parallelism", "seq_parallel_communication_data_type"),
    *(
        ZERO + name
        for name in (
            *("allgather_*", "*bucket_size", "reduce_scatter", "contiguous_gradients"),
            *("overlap_comm", "round_robin_gradients", "grad_hooks", "sub_group_size"),
            *("use_multi_rank_bucket_allreduce", "legacy_stage1", "stage3_allgather_sequential"),
            *("*use_all_reduce_for_fetch_params", "*max_live_parameters", "*max_reuse_distance"),
            *("*_threshold", "leaf_module*", "memory_efficient_linear", "*weights_on_model_save"),
            *("elastic_checkpoint", "load_from_fp32_weights", "pipeline_loading_checkpoint"),
            *("*_unused_parameters", "override_module_apply", "log_trace_cache_warnings"),
            *("enable_sanity_checks", "save_muon_momentum_buffer_in_memory"),
            *("offload_optimizer.*", "offload_param.*"),
        )
    ),
    *("checkpoint", "aio", "compile.*", "steps_per_print", "wall_clock_breakdown", "timers"),
    *("csv_monitor", "memory_breakdown", "dump_state", "log_level", "vocabulary_size"),
    *("tensorboard.*", "wandb.*", "flops_profiler", "comms_logger", "activation_checkpointing"),
    *("hybrid_engine.*", "dataloader_drop_last"),
)
"""Patterns of keys or sections that have no effect here; `docs/deepspeed.md` gives the reasons."""

SECTIONS = frozenset(
    name.rsplit(".", depth)[0]
    for name in (*SUPPORTED, *IGNORED)
    for depth in range(1, name.count(".") + 1)
)

NEUTRAL = {
    f"{ZERO}mics_shard_size": -1,
    f"{ZERO}zero_hpz_partition_size": 1,
    "sequence_parallel_size": 1,
    "gradient_allreduce_op": "mean",
    "managed_gradient_accumulation": True,
}
"""Values other than false and 0 that leave a feature off."""

DEEPSPEED_SCHEDULES = {
    "WarmupLR": "constant_with_warmup",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
}
"""DeepSpeed's schedules with our names for them; here, all warm up linearly from 0."""

IGNORED_PARAMS = ("warmup_type", "warmup_min_lr", "total_num_steps", "last_batch_iteration")
"""Parameters of DeepSpeed's schedules that have no effect; the run determines the length."""

FIXED_PARAMS = {
    **dict.fromkeys(("adam_w_mode", "torch_adam", "fused", "foreach", "capturable")),
    "set_grad_none": None,
    "bias_correction": True,
    "eps_inside_sqrt": False,
}
"""Parameters of AdamW, each with the only value that is accepted here; None accepts any."""

# Defaults of DeepSpeed's constructors.
WARMUP_STEPS = 1000
MAX_LR = 1e-3
COS_MIN_RATIO = 1e-4


@dataclass(frozen=True)
class DeepSpeedFile:
    """The keys of a file, by their effect."""

    origin: str
    supported: dict[str, Any] = field(default_factory=dict[str, Any])
    ignored: list[str] = field(default_factory=list[str])

    def get(self, key: str) -> Any:  # noqa: ANN401
        """Return the value of a key with an effect, or None if it is missing or "auto"."""
        value = self.supported.get(key)
        return None if value == AUTO else _normalize(value)

    def params(self, key: str) -> dict[str, Any]:
        """Return the optimizer's or schedule's parameters that are neither null nor "auto"."""
        section = self.supported.get(key) or {}
        if not isinstance(section, Mapping):
            raise self.error(key, f"must be an object, {{...}}, got {section!r}")
        params = {str(name): _normalize(value) for name, value in section.items()}
        return {name: value for name, value in params.items() if value not in (None, AUTO)}

    def batch_size(self, key: str) -> int | None:
        """Return a batch size, or None if it is missing or "auto"."""
        value = self.get(key)
        if value is None or (isinstance(value, int) and value is not True and value > 0):
            return value
        raise self.error(key, f"must be a positive integer, got {value!r}")

    def error(self, key: str, message: str) -> ConfigError:
        """Return an error whose message starts with the key and the file."""
        return ConfigError(f"{key} in {self.origin} {message}")


def deepspeed_layer(
    config_class: type,
    path: Path,
    layers: Sequence[Layer] = (),
    overrides: Sequence[Option] = (),
    *,
    world: int,
) -> Layer:
    """Convert a DeepSpeed file to settings of a step with `world` processes.

    All trained models of the step get the same settings; batch sizes and trackers apply to the
    step. `layers` and `overrides` are its other settings, which determine how many of the processes
    are data-parallel.

    Raises:
        ConfigError: the file can't be used, or the step trains no model.
    """
    hints = typing.get_type_hints(config_class)
    roles = [
        item.name
        for item in fields(config_class)
        if section_class(hints[item.name]) is TrainedModelConfig
    ]
    require(bool(roles), f"--zero-config {path}: the step trains no model; remove the option")
    file = parse_file(path)
    converters = (_convert_precision, _convert_zero, _convert_optimizer, _convert_schedule)
    model_settings = {key: value for convert in converters for key, value in convert(file).items()}
    settings: dict[str, Any] = {role: unflatten(model_settings) for role in roles}
    trackers = [name for name in typing.get_args(Tracker) if file.get(f"{name}.enabled")]
    settings |= {"trackers": trackers} if trackers else {}
    sizes = _convert_batch_sizes(file, _count_shares(config_class, layers, overrides, world))
    return Layer({**settings, **sizes}, str(path), is_file=True)


def _count_shares(
    config_class: type, layers: Sequence[Layer], overrides: Sequence[Option], world: int
) -> int:
    """Return the number of processes, or model-parallel groups, with different training rows."""
    given = merge(config_class, layers, overrides)
    try:
        parallel = build_config(ParallelConfig, [Layer(given.get("parallel", {}), "")])
        rollout = int(given.get("rollout_processes", 0))
        return parallel.num_pipelines(world - rollout) if 0 <= rollout < world else world
    except (TypeError, ValueError):  # building the step's settings gives a better error
        return world


def ignored_keys_notice(path: Path) -> str | None:
    """Return a notice about keys of a file that have no effect, or None if there are none.

    Raises:
        ConfigError: the file can't be read, or has a key that is not supported.
    """
    keys = parse_file(path).ignored
    return f"ignored keys in {path}: {', '.join(keys)}" if keys else None


def _convert_batch_sizes(file: DeepSpeedFile, shares: int) -> dict[str, int]:
    """Return the sizes, where train_batch_size = micro-batch size x accumulation steps x shares."""
    train, micro, accumulation = (file.batch_size(key) for key in BATCH_KEYS)
    if train is None and micro and (accumulation or BATCH_KEYS[0] not in file.supported):
        train = micro * (accumulation or 1) * shares
    elif train and accumulation:
        divisor = accumulation * shares
        factor = f"{BATCH_KEYS[1]} ({micro}) x" if micro else "a multiple of"
        micro = micro or -(-train // divisor)
        if micro * divisor != train:
            raise file.error(
                BATCH_KEYS[0],
                f"is {train}, which is not {factor} {BATCH_KEYS[2]} ({accumulation}) x"
                f" {counted(shares, 'data-parallel process')}; remove one key, or choose sizes that"
                " agree",
            )
    sizes = {"batch_size": train, "micro_batch_size": micro}
    return {name: size for name, size in sizes.items() if size is not None}


def _convert_precision(file: DeepSpeedFile) -> dict[str, Any]:
    """Return the data type and loss scale; the type is fp32 if both formats are off."""
    keys = [key for key in ("fp16.enabled", "bf16.enabled") if key in file.supported]
    enabled = [key for key in keys if file.get(key)]
    if len(enabled) == 2:
        raise file.error("fp16.enabled", "and bf16.enabled are both true; keep one")
    settings: dict[str, Any] = {}
    if enabled:
        settings["precision"] = enabled[0].partition(".")[0]
    elif keys and all(file.get(key) is not None for key in keys):
        settings["precision"] = "fp32"
    if file.supported.get("fp16.enabled"):
        settings |= {f"fp16.{name}": file.get(f"fp16.{name}") for name in FP16_KEYS}
    return {name: value for name, value in settings.items() if value is not None}


def _convert_zero(file: DeepSpeedFile) -> dict[str, Any]:
    """Return the settings of the ZeRO stage, offload and communication data type."""
    stage = file.get(f"{ZERO}stage")
    if f"{ZERO}stage" not in file.supported and any(key.startswith(ZERO) for key in file.supported):
        stage = 0
    devices = {name: file.get(f"{prefix}device") for name, prefix in OFFLOADS.items()}
    # DeepSpeed stores reduced gradients where the optimizer runs.
    offloads_gradients = devices["optimizer"] not in (None, "none") and stage in (2, 3)
    dtypes = {"fp32": "fp32", "bf16": "bf16", "bfp16": "bf16"}
    dtype = file.get("communication_data_type")
    paths = (file.get(f"{prefix}nvme_path") for prefix in OFFLOADS.values())
    settings = {
        "zero_stage": stage,
        "zero.offload.optimizer": devices["optimizer"],
        "zero.offload.gradients": "cpu" if offloads_gradients else None,
        "zero.offload.params": devices["params"],
        "zero.offload.nvme_path": next(filter(None, paths), None),
        "zero.reduce_dtype": dtypes.get(str(dtype), dtype),
    }
    return {name: value for name, value in settings.items() if value is not None}


def _convert_optimizer(file: DeepSpeedFile) -> dict[str, Any]:
    """Return the parameters of AdamW and the clipping threshold."""
    params = file.params("optimizer.params")
    settings: dict[str, Any] = {}
    optimizer_clip = params.pop("max_grad_norm", None)
    clip = file.get("gradient_clipping")
    clip = optimizer_clip if clip is None else clip
    if clip is not None:
        settings["optim.max_grad_norm"] = clip or None
    for param in ("lr", "betas", "eps", "weight_decay"):
        if param in params:
            settings[f"optim.{param}"] = params.pop(param)
    name = file.get("optimizer.type")
    if name is None:
        return settings
    is_adamw = str(name).lower() in ("adam", "adamw") and params.get("adam_w_mode") is not False
    if not is_adamw:
        raise file.error("optimizer.type", f"is {name}, which is not supported; use AdamW")
    for param, value in params.items():
        required = FIXED_PARAMS.get(param, AUTO)
        if required not in (None, value) and (param in FIXED_PARAMS or not _is_off(value)):
            raise file.error(f"optimizer.params.{param}", "is not supported; remove it")
    return settings


def _convert_schedule(file: DeepSpeedFile) -> dict[str, Any]:
    """Return the schedule, its warm-up, and its rates, which override those of the optimizer."""
    name = file.get("scheduler.type")
    if name is None:
        return {}
    names = {schedule.lower(): schedule for schedule in DEEPSPEED_SCHEDULES}
    if str(name).lower() not in names:
        hint = suggestion(str(name), names)
        raise file.error("scheduler.type", f"is {name}, which is not supported; {hint}")
    name = names[str(name).lower()]
    params = file.params("scheduler.params")
    params = {key: value for key, value in params.items() if key not in IGNORED_PARAMS}
    given = file.supported.get("scheduler.params") or {}
    auto = {key for key, value in given.items() if value == AUTO}
    settings = {"optim.schedule": DEEPSPEED_SCHEDULES[name], "optim.final_lr_ratio": 0.0}
    if "warmup_num_steps" not in auto:
        settings["optim.warmup_steps"] = params.pop("warmup_num_steps", WARMUP_STEPS)
    if name == "WarmupCosineLR" and "cos_min_ratio" not in auto:
        settings["optim.final_lr_ratio"] = params.pop("cos_min_ratio", COS_MIN_RATIO)
    if name == "WarmupDecayLR" and "warmup_max_lr" not in auto:
        settings["optim.lr"] = MAX_LR
    if "warmup_max_lr" in params:
        settings["optim.lr"] = params.pop("warmup_max_lr")
    if params:
        param = next(iter(params))
        raise file.error(f"scheduler.params.{param}", "is not supported; remove it")
    return settings


# Match strings first, so that comments and commas inside them are preserved.
_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_TRAILING_COMMA = re.compile(r'("(?:\\.|[^"\\\n])*")|,(?=\s*[}\]])')


def parse_file(path: Path) -> DeepSpeedFile:
    """Read a DeepSpeed file and classify its keys.

    Raises:
        ConfigError: the file doesn't exist or is not JSON, or a key is duplicated or unsupported.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such DeepSpeed configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None

    def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        require(not repeated, f"{path} has {', '.join(repeated)} twice in one section; keep one")
        return dict(pairs)

    text = _COMMENT.sub(lambda match: match[1] or re.sub(r"[^\n]", " ", match[0]), text)
    text = _TRAILING_COMMA.sub(lambda match: match[1] or " ", text)
    try:
        content = json.loads(text, object_pairs_hook=reject_duplicates)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply for a DeepSpeed configuration") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must contain one JSON object, {{...}}")
    file = DeepSpeedFile(str(path))
    _classify_keys(content, file)
    return file


def _classify_keys(section: Mapping[str, Any], file: DeepSpeedFile, prefix: str = "") -> None:
    for key, value in section.items():
        name = f"{prefix}{key}"
        if key.startswith("_") or value is None:  # such as "_comment", since JSON has no comments
            continue
        if name in SUPPORTED:
            file.supported[name] = value
            if name == "scheduler.params" and isinstance(value, Mapping):
                unused = [param for param in IGNORED_PARAMS if value.get(param) not in (None, AUTO)]
                file.ignored.extend(f"{name}.{param}" for param in unused)
        elif any(fnmatch(name, pattern) for pattern in IGNORED):
            if not (isinstance(value, Mapping) and value.get("enabled") is False):
                file.ignored.append(name)
        elif name in SECTIONS and value is not False:
            if not isinstance(value, Mapping):
                raise file.error(name, f"must be an object, {{...}}, got {value!r}")
            _classify_keys(value, file, f"{name}.")
        elif not _is_off(value) and value != NEUTRAL.get(name):
            raise file.error(name, f"is not supported; {_suggest_key(name)}")


def _is_off(value: object) -> bool:
    """Return whether `value` disables a feature: `{"enabled": false}`, or only neutral values."""
    if isinstance(value, Mapping):
        inner = [value["enabled"]] if "enabled" in value else value.values()
        return all(_is_off(item) for item in inner)
    return value in (None, False, 0, AUTO, [])


def _suggest_key(name: str) -> str:
    """Suggest the key that was probably meant."""
    known, last = [*SUPPORTED, *SECTIONS], name.rpartition(".")[2]
    same_name = [key for key in known if key.rpartition(".")[2] == last]
    matches = same_name[:2] or difflib.get_close_matches(name, known, 2, 0.78)
    if matches:
        return f"did you mean {' or '.join(matches)}?"
    return "remove it (docs/deepspeed.md lists the supported keys)"


def _normalize(value: Any) -> Any:  # noqa: ANN401
    """Convert an integral number such as 5e8 to an int."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
