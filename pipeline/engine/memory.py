"""Memory of a model in training: `python -m pipeline.engine.memory`.

Prints DeepSpeed's estimates, by its own formulas, and the bytes of this engine's weights, masters,
moments and gradients on each process. Activations come on top.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.cli.command import read_command
from pipeline.cli.options import run_main, say
from pipeline.config import FrozenModelConfig
from pipeline.system.errors import require
from pipeline.system.installation import MODULE

_USAGE = (
    f"{MODULE} pipeline.engine.memory --params N [--largest-layer N] [--gpus N]",
    f"{MODULE} pipeline.engine.memory --model NAME [--gpus N] [--nodes N]",
)

BUFFER_FACTOR = 1.5
"""DeepSpeed's allowance for buffers in host memory."""

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
    """The model and the machines."""

    params: str | None = None
    """Parameters of the model, such as 7B or 1889110016."""

    largest_layer: str | None = None
    """Parameters of the largest module, without its submodules, such as 189.5M; DeepSpeed's stage 3
    estimate needs it."""

    model: str | None = None
    """Hugging Face model id or directory, instead of `params`; only its configuration is read."""

    gpus: int = 1
    """GPUs (processes) of each machine."""

    nodes: int = 1
    """Machines."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""

    def __post_init__(self) -> None:
        require(
            (self.params is None) != (self.model is None),
            "--model or --params must be given, one of them; --help explains",
        )
        require(self.gpus > 0, f"gpus must be above 0, got {self.gpus}")
        require(self.nodes > 0, f"nodes must be above 0, got {self.nodes}")


@dataclass(frozen=True)
class Estimate:
    """One line of DeepSpeed's tables, in bytes."""

    cpu: int
    """On each machine."""

    gpu: int
    """On each GPU."""

    options: str


def estimate_zero2(params: int, *, gpus: int = 1, nodes: int = 1) -> list[Estimate]:
    """DeepSpeed's `estimate_zero2_model_states_mem_needs_all_cold`, line by line."""
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
    """DeepSpeed's `estimate_zero3_model_states_mem_needs_all_cold`, line by line."""
    world = gpus * nodes
    layer = 4 * largest_layer
    # (parameters offloaded, optimizer offloaded): bytes a parameter in host memory and on the GPUs
    rows = (("cpu ", "cpu ", 18, 0), ("none", "cpu ", 16, 2), ("none", "none", 0, 18))
    estimates = []
    for offload_param, offload_optimizer, host, device in rows:
        gpu = layer + int(device * params / world)
        for zero_init in (1, 0):
            # Without zero_init every process builds the full model in host memory first.
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


def engine_bytes(params: int, *, world: int, stage: int) -> dict[str, int]:
    """Bytes of this engine on each process, with bf16 weights and AdamW."""
    sharded = params // world
    return {
        "weights": 2 * (sharded if stage == 3 else params),
        "masters": 2 * (sharded if stage else params),  # the 16 bits that bf16 weights lack
        "moments": 8 * (sharded if stage else params),
        "gradients": 4 * sharded,
    }


def count_parameters(name: str, *, trust_remote_code: bool) -> tuple[int, int]:
    """All parameters of a model, and those of its largest module without submodules."""
    import torch

    from pipeline.models.meta import model_on_meta

    source = FrozenModelConfig(path=name, precision="bf16", trust_remote_code=trust_remote_code)
    model = model_on_meta(source, task="causal", device=torch.device("cpu"))
    layers = (
        sum(param.numel() for param in module.parameters(recurse=False))
        for module in model.modules()
    )
    return sum(param.numel() for param in model.parameters()), max(layers)


def main(argv: Sequence[str]) -> None:
    """Print the tables."""
    config = read_command(
        MemoryConfig,
        argv,
        usage=_USAGE,
        about="Print DeepSpeed's estimates of memory, and the bytes of this engine.",
    )
    say("\n\n".join(_tables(config)))


def _tables(config: MemoryConfig) -> Iterator[str]:
    largest: int | None = None
    if config.model is not None:
        params, largest = count_parameters(config.model, trust_remote_code=config.trust_remote_code)
    else:
        params = parse_count(config.params or "", "--params")
        if config.largest_layer is not None:
            largest = parse_count(config.largest_layer, "--largest-layer")
            require(
                largest <= params, "--largest-layer must not have more parameters than --params"
            )
    yield f"{params:,} parameters on {config.nodes} machines with {config.gpus} processes each"
    yield "DeepSpeed's estimate for ZeRO stage 2\n" + _format(
        estimate_zero2(params, gpus=config.gpus, nodes=config.nodes)
    )
    yield "DeepSpeed's estimate for ZeRO stage 3\n" + (
        "needs --largest-layer, the parameters of the largest layer, or --model"
        if largest is None
        else _format(estimate_zero3(params, largest, gpus=config.gpus, nodes=config.nodes))
    )
    world = config.gpus * config.nodes
    lines = ["This engine's GB on each process, bf16 with AdamW, without activations"]
    for stage in range(4):
        kinds = engine_bytes(params, world=world, stage=stage)
        shown = [f"{kind} {size / 2**30:.2f}" for kind, size in kinds.items()]
        total = sum(kinds.values()) / 2**30
        lines.append(f"  stage {stage}: {', '.join(shown)}; total {total:.2f}")
    yield "\n".join(lines)


def _format(estimates: Sequence[Estimate]) -> str:
    lines = ["  per CPU  |  per GPU |   Options"]
    for estimate in estimates:
        cpu, gpu = estimate.cpu / 2**30, estimate.gpu / 2**30
        lines.append(f" {cpu:7.2f}GB | {gpu:6.2f}GB | {estimate.options}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
