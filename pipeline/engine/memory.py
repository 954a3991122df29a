"""What training a model takes, before a byte is allocated: `python -m pipeline.engine.memory`.

Two answers: DeepSpeed's estimates, by its own formulas, and the exact bytes that our engine holds
on each process. Activations come on top; they grow with micro-batch and length.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipeline.cli import help_entry, run_main, say, settings_help, split_options
from pipeline.errors import ModelError, require
from pipeline.settings import build_config, list_settings

if TYPE_CHECKING:
    from torch import nn

ADAM_BYTES = 16
"""Bytes a parameter in mixed-precision training with Adam (Rajbhandari et al. 2020, section 3.1): 2
for the weight, 2 for its gradient, 4 each for master weight, momentum and variance."""

BUFFER_FACTOR = 1.5
"""DeepSpeed's allowance for buffers in host memory."""

KINDS = ("params", "gradients", "masters", "moments", "gathered", "gradient_buffer")
"""What `predict` counts."""


@dataclass(frozen=True)
class GroupShape:
    """Parameters of one unit that lie in one flat vector."""

    numel: int
    """Elements, without padding."""

    itemsize: int
    """Bytes of an element of the weights: 2 or 4."""

    trained: bool = True
    """False for frozen weights, which have neither gradients nor optimizer state."""


UnitShapes = tuple[list[GroupShape], list[list[GroupShape]]]
"""The root's groups, and those of each transformer block."""


@dataclass(frozen=True)
class Estimate:
    """One line of DeepSpeed's tables, in bytes."""

    cpu: int
    """On each machine."""

    gpu: int
    """On each GPU."""

    options: str


def padded(numel: int, world: int) -> int:
    """Elements of a flat vector: a multiple that cuts into `world` aligned shares."""
    multiple = math.lcm(64, world) * 16
    return -(-numel // multiple) * multiple


def predict(
    root: Sequence[GroupShape],
    blocks: Sequence[Sequence[GroupShape]],
    *,
    stage: int,
    world: int,
) -> dict[str, int]:
    """Bytes that our engine holds on each process, by kind.

    Args:
        root: the flat vectors of what lies outside the transformer blocks.
        blocks: those of each transformer block.
        stage: ZeRO stage, 0 to 3.
        world: processes that share the model.

    Returns:
        `params`: weights as the model has them; `gradients`: fp32, accumulated over
        micro-batches; `masters`: fp32 copies of trained weights below fp32; `moments`: Adam's two,
        fp32; `gathered`: at stage 3, the peak of whole weights at a time, which are the root's and
        those of the two largest units; `gradient_buffer`: from stage 2, the whole fp32 gradient of
        the unit in its backward pass.
    """
    units = [root, *blocks]
    groups = [group for unit in units for group in unit]

    def share(group: GroupShape, from_stage: int) -> int:
        whole = padded(group.numel, world)
        return whole // world if stage >= from_stage else whole

    def whole_weights(unit: Sequence[GroupShape]) -> int:
        return sum(padded(group.numel, world) * group.itemsize for group in unit)

    def whole_gradient(unit: Sequence[GroupShape]) -> int:
        return sum(padded(group.numel, world) * 4 for group in unit if group.trained)

    trained = [group for group in groups if group.trained]
    largest = sorted(map(whole_weights, blocks), reverse=True)[:2]
    return {
        "params": sum(share(group, 3) * group.itemsize for group in groups),
        "gradients": sum(share(group, 2) * 4 for group in trained),
        "masters": sum(share(group, 1) * 4 for group in trained if group.itemsize < 4),
        "moments": sum(share(group, 1) * 8 for group in trained),
        "gathered": whole_weights(root) + sum(largest) if stage == 3 else 0,
        "gradient_buffer": max(map(whole_gradient, units), default=0) if stage >= 2 else 0,
    }


def estimate_zero2(params: int, *, gpus: int = 1, nodes: int = 1) -> list[Estimate]:
    """DeepSpeed's `estimate_zero2_model_states_mem_needs_all_cold`, line by line.

    Args:
        params: parameters of the model.
        gpus: GPUs of each machine.
        nodes: machines.
    """
    world = gpus * nodes
    offloaded_cpu = int(params * max(4 * world, 16) * BUFFER_FACTOR)
    return [
        Estimate(offloaded_cpu, 2 * params, "offload_optimizer=cpu "),
        Estimate(
            int(params * 4 * gpus * BUFFER_FACTOR),
            2 * params + int(18 * params / world),
            "offload_optimizer=none",
        ),
    ]


def estimate_zero3(
    params: int, largest_layer: int, *, gpus: int = 1, nodes: int = 1
) -> list[Estimate]:
    """DeepSpeed's `estimate_zero3_model_states_mem_needs_all_cold`, line by line.

    Args:
        params: parameters of the model.
        largest_layer: parameters of the largest module, without those of modules within it.
        gpus: GPUs of each machine.
        nodes: machines.
    """
    world = gpus * nodes
    layer = 4 * largest_layer
    # (parameters offloaded, optimizer offloaded): bytes a parameter in host memory and on the GPUs
    rows = (("cpu ", "cpu ", 18, 0), ("none", "cpu ", 16, 2), ("none", "none", 0, 18))
    estimates = []
    for offload_param, offload_optimizer, host, device in rows:
        gpu = layer + int(device * params / world)
        for zero_init in (1, 0):
            # Without zero_init every process builds the whole model in host memory first.
            if host:
                each = host / nodes if zero_init else max(4 * gpus, host / nodes)
                cpu = params * each * BUFFER_FACTOR
            else:
                cpu = (largest_layer if zero_init else params) * 4 * gpus * BUFFER_FACTOR
            options = (
                f"offload_param={offload_param}, offload_optimizer={offload_optimizer},"
                f" zero_init={zero_init}"
            )
            estimates.append(Estimate(int(cpu), gpu, options))
    return estimates


def format_estimates(
    estimates: Sequence[Estimate],
    *,
    params: int,
    largest_layer: int | None = None,
    gpus: int = 1,
    nodes: int = 1,
) -> str:
    """The table as DeepSpeed prints it; its GB are 2**30 bytes."""
    layer = "" if largest_layer is None else f", {largest_layer // 10**6}M largest layer params"
    lines = [
        "Estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {nodes} {'nodes' if nodes > 1 else 'node'},"
        f" {gpus} {'GPUs' if gpus > 1 else 'GPU'} per node.",
        f"SW: Model with {params // 10**6}M total params{layer}.",
        "  per CPU  |  per GPU |   Options",
    ]
    for estimate in estimates:
        cpu, gpu = estimate.cpu / 2**30, estimate.gpu / 2**30
        lines.append(f" {cpu:7.2f}GB | {gpu:6.2f}GB | {estimate.options}")
    return "\n".join(lines)


def format_prediction(prediction: Mapping[int, Mapping[str, int]], *, world: int) -> str:
    """Our bytes on each process, one line a stage."""
    names = (*(kind.replace("_", " ") for kind in KINDS), "total")
    processes = "1 process" if world == 1 else f"each of {world} processes"
    lines = [
        f"This engine's bytes on {processes}, without activations:",
        "  stage | " + " | ".join(f"{name:>15}" for name in names),
    ]
    for stage, kinds in prediction.items():
        sizes = [*(kinds[kind] for kind in KINDS), sum(kinds.values())]
        lines.append(f"  {stage:5} | " + " | ".join(f"{size:15,}" for size in sizes))
    return "\n".join(lines)


_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMB]?)", re.IGNORECASE)


def parse_count(text: str, name: str) -> int:
    """A number of parameters: 1889110016, 1889.1M, 7B, 7e9.

    Raises:
        ConfigError: it is not a number above 0.
    """
    match = _COUNT.fullmatch(text.strip().replace("_", "").replace(",", ""))
    factor = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
    count = round(float(match[1]) * factor[match[2].upper()]) if match else 0
    require(count > 0, f"{name} must be a number of parameters such as 1889.1M or 7B, got {text}")
    return count


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What is to be trained, on what."""

    params: str | None = None
    """Parameters of the model, such as 7B or 1889110016."""

    largest_layer: str | None = None
    """Parameters of the largest module, without those of modules within it, such as 189.5M;
    DeepSpeed's stage 3 estimate needs it."""

    model: str | None = None
    """Hugging Face model id or directory, instead of `params`; only its configuration is read. Our
    own engine's bytes are predicted as well."""

    gpus: int = 1
    """GPUs (processes) of each machine."""

    nodes: int = 1
    """Machines."""

    stage: Literal[0, 1, 2, 3] | None = None
    """ZeRO stage; null shows all."""

    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Number format of the model's weights."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""

    def __post_init__(self) -> None:
        require(
            (self.params is None) != (self.model is None),
            "model or params must be given, one of them; --help explains",
        )
        require(self.gpus > 0, f"gpus must be above 0, got {self.gpus}")
        require(self.nodes > 0, f"nodes must be above 0, got {self.nodes}")


def main(argv: Sequence[str]) -> None:
    """Print the tables."""
    options = split_options(argv)
    if any(name == "help" for name, _ in options):
        say(_help())
        return
    say("\n\n".join(_tables(build_config(MemoryConfig, [], options))))


def _tables(config: MemoryConfig) -> Iterator[str]:
    shapes: UnitShapes | None = None
    largest: int | None = None
    if config.model is not None:
        model = build_on_meta(config)
        shapes = unit_shapes(model)
        params, largest = count_parameters(model)
    else:
        params = parse_count(config.params or "", "params")
        if config.largest_layer is not None:
            largest = parse_count(config.largest_layer, "largest_layer")
            require(largest <= params, "largest_layer must not have more parameters than params")
    yield (
        f"{params:,} parameters x {ADAM_BYTES} bytes (weights 2, gradients 2, fp32 masters 4,"
        f" Adam's moments 8) = {ADAM_BYTES * params / 1e9:.1f} GB (10**9 bytes), before anything is"
        " shared out"
    )
    hardware = {"params": params, "gpus": config.gpus, "nodes": config.nodes}
    if config.stage in (None, 2):
        yield "DeepSpeed's estimate for ZeRO stage 2\n" + format_estimates(
            estimate_zero2(**hardware), **hardware
        )
    if config.stage in (None, 3):
        yield "DeepSpeed's estimate for ZeRO stage 3\n" + _zero3_table(largest, hardware)
    if shapes is not None:
        world = config.gpus * config.nodes
        stages = range(4) if config.stage is None else [config.stage]
        prediction = {stage: predict(*shapes, stage=stage, world=world) for stage in stages}
        yield format_prediction(prediction, world=world)


def _zero3_table(largest: int | None, hardware: Mapping[str, int]) -> str:
    if largest is None:
        return "needs --largest-layer, the parameters of the largest layer, or --model"
    return format_estimates(
        estimate_zero3(largest_layer=largest, **hardware), largest_layer=largest, **hardware
    )


def _help() -> str:
    return "\n".join(
        [
            "usage: python -m pipeline.engine.memory --params N [--largest-layer N] [--gpus N]",
            "       python -m pipeline.engine.memory --model NAME [--gpus N] [--nodes N]",
            "",
            "Print DeepSpeed's estimates of memory, and with --model this engine's exact bytes.",
            "",
            *help_entry("--help", "Print this and stop."),
            *settings_help(list_settings(MemoryConfig), dashes=True),
        ]
    )


def build_on_meta(config: MemoryConfig) -> "nn.Module":
    """The causal language model, without memory for its weights.

    Raises:
        ModelError: there is no such model.
    """
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    from pipeline.config import EMBEDDED
    from pipeline.models.embedded import build_model, build_tokenizer
    from pipeline.models.load import weight_dtype

    name, trust = str(config.model), config.trust_remote_code
    dtype = weight_dtype(config.precision, torch.device("cpu"))
    if name == EMBEDDED:
        model = build_model(vocab_size=len(build_tokenizer()), seed=0)
        return nn.Module.to(model, dtype=dtype)
    try:
        settings = AutoConfig.from_pretrained(name, trust_remote_code=trust)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(settings, dtype=dtype, trust_remote_code=trust)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"the model {name} has no configuration to read ({reason})") from None


def count_parameters(model: "nn.Module") -> tuple[int, int]:
    """All parameters, and those of the largest module without the modules within it.

    Tied parameters count once in all, and wherever they stand in the largest.
    """
    layers = (
        sum(param.numel() for param in module.parameters(recurse=False))
        for module in model.modules()
    )
    return sum(param.numel() for param in model.parameters()), max(layers)


def unit_shapes(model: "nn.Module") -> UnitShapes:
    """The flat vectors of the root and of each transformer block, one for each kind of weights."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    blocks: list[list[GroupShape]] = []
    inside: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            params = [param for param in module.parameters() if param not in inside]
            if params:  # else it lies in a block that has been counted
                blocks.append(_groups(params))
                inside.update(params)
    root = [param for param in model.parameters() if param not in inside]
    return _groups(root), blocks


def _groups(params: Sequence["nn.Parameter"]) -> list[GroupShape]:
    kinds = Counter[tuple[int, bool]]()
    for param in params:
        kinds[param.element_size(), param.requires_grad] += param.numel()
    return [GroupShape(numel, size, trained) for (size, trained), numel in kinds.items()]


if __name__ == "__main__":
    run_main(main)
