"""What training a model takes, before a byte is allocated: `python -m pipeline.engine.memory`.

Two answers: DeepSpeed's estimates, by its own formulas, and the exact bytes that our engine holds
on each process. Activations come on top; they grow with micro-batch and length.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipeline.cli import run_main, say
from pipeline.command import read_command
from pipeline.config import FrozenModelConfig, TrainedModelConfig
from pipeline.engine.estimates import estimate_zero2, estimate_zero3, format_estimates
from pipeline.errors import require
from pipeline.installation import MODULE

if TYPE_CHECKING:
    from torch import nn

_USAGE = (
    f"{MODULE} pipeline.engine.memory --params N [--largest-layer N] [--gpus N]",
    f"{MODULE} pipeline.engine.memory --model NAME [--gpus N] [--nodes N]",
)

ADAM_BYTES = 16
"""Bytes a parameter in mixed-precision training with Adam (Rajbhandari et al. 2020, section 3.1): 2
for the weight, 2 for its gradient, 4 each for master weight, momentum and variance. This engine
sums gradients in fp32 and keeps 2 bytes of the master beside the weight: 16 as well."""


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
    """ZeRO stage of DeepSpeed's estimates, which are for 2 and 3; null shows both."""

    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Number format of the model's weights."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""

    def __post_init__(self) -> None:
        require(
            (self.params is None) != (self.model is None),
            "--model or --params must be given, one of them; --help explains",
        )
        require(self.gpus > 0, f"gpus must be above 0, got {self.gpus}")
        require(self.nodes > 0, f"nodes must be above 0, got {self.nodes}")


def main(argv: Sequence[str]) -> None:
    """Print the tables."""
    config = read_command(
        MemoryConfig,
        argv,
        usage=_USAGE,
        about="Print DeepSpeed's estimates of memory, and with --model this engine's exact bytes.",
    )
    say("\n\n".join(_tables(config)))


def _tables(config: MemoryConfig) -> Iterator[str]:
    model: nn.Module | None = None
    largest: int | None = None
    if config.model is not None:
        model = _model(config)
        params, largest = count_parameters(model)
    else:
        params = parse_count(config.params or "", "--params")
        if config.largest_layer is not None:
            largest = parse_count(config.largest_layer, "--largest-layer")
            require(
                largest <= params, "--largest-layer must not have more parameters than --params"
            )
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
    if model is not None:
        yield _prediction_table(model, world=config.gpus * config.nodes)


def _model(config: MemoryConfig) -> "nn.Module":
    import torch

    from pipeline.models.meta import model_on_meta

    source = FrozenModelConfig(
        path=config.model,
        precision=config.precision,
        trust_remote_code=config.trust_remote_code,
    )
    return model_on_meta(source, task="causal", device=torch.device("cuda")).requires_grad_()


def _prediction_table(model: "nn.Module", *, world: int) -> str:
    """Our bytes on each GPU, one line a stage."""
    import torch

    from pipeline.engine.predict import KINDS, predict

    stages: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
    device = torch.device("cuda")
    names = (*(kind.replace("_", " ") for kind in KINDS), "total")
    lines = [
        f"This engine's bytes on {'1 GPU' if world == 1 else f'each of {world} GPUs'} with AdamW,"
        " without activations",
        "  stage | " + " | ".join(f"{name:>16}" for name in names),
    ]
    for stage in stages:
        settings = TrainedModelConfig(zero_stage=stage)
        kinds = predict(model, settings, world=world, device=device)
        sizes = [*(kinds[kind] for kind in KINDS), sum(kinds.values())]
        lines.append(f"  {stage:5} | " + " | ".join(f"{size:16,}" for size in sizes))
    return "\n".join(lines)


def _zero3_table(largest: int | None, hardware: Mapping[str, int]) -> str:
    if largest is None:
        return "needs --largest-layer, the parameters of the largest layer, or --model"
    return format_estimates(
        estimate_zero3(largest_layer=largest, **hardware), largest_layer=largest, **hardware
    )


def count_parameters(model: "nn.Module") -> tuple[int, int]:
    """All parameters, and those of the largest module without the modules within it.

    Tied parameters count once in all, and wherever they stand in the largest.
    """
    layers = (
        sum(param.numel() for param in module.parameters(recurse=False))
        for module in model.modules()
    )
    return sum(param.numel() for param in model.parameters()), max(layers)


if __name__ == "__main__":
    run_main(main)
