"""Memory of a model in training: `python -m pipeline.engine.memory`.

Prints the bytes of weights, masters, moments and gradients on each process, for each ZeRO stage.
Activations come on top.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.cli.options import read_command, run_main, say
from pipeline.config import FrozenModelConfig
from pipeline.system.errors import require
from pipeline.system.installation import MODULE

_USAGE = (
    f"{MODULE} pipeline.engine.memory --params N [--gpus N]",
    f"{MODULE} pipeline.engine.memory --model NAME [--gpus N] [--nodes N]",
)


def parse_count(text: str, name: str) -> int:
    """A number of parameters: 1889110016, 1889.1M, 7B, 7e9.

    Raises:
        ConfigError: it is not a number above 0.
    """
    number = text.strip().upper().replace("_", "").replace(",", "")
    factor = {"K": 10**3, "M": 10**6, "B": 10**9}.get(number[-1:], 1)
    try:
        count = round(float(number.rstrip("KMB")) * factor)
    except (ValueError, OverflowError):
        count = 0
    require(count > 0, f"{name} must be a number of parameters such as 1889.1M or 7B, got {text}")
    return count


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """The model and the machines."""

    params: str | None = None
    """Parameters of the model, such as 7B or 1889110016."""

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


def engine_bytes(params: int, *, world: int, stage: int) -> dict[str, int]:
    """Bytes of this engine on each process, with bf16 weights and AdamW."""
    sharded = params // world
    return {
        "weights": 2 * (sharded if stage == 3 else params),
        "masters": 2 * (sharded if stage else params),  # the 16 bits that bf16 weights lack
        "moments": 8 * (sharded if stage else params),
        "gradients": 4 * sharded,
    }


def count_parameters(name: str, *, trust_remote_code: bool) -> int:
    """Number of parameters of a model, by its configuration."""
    import torch

    from pipeline.models.hf.meta import model_on_meta

    source = FrozenModelConfig(path=name, precision="bf16", trust_remote_code=trust_remote_code)
    model = model_on_meta(source, task="causal", device=torch.device("cpu"))
    return sum(param.numel() for param in model.parameters())


def main(argv: Sequence[str]) -> None:
    """Print the table."""
    config = read_command(
        MemoryConfig,
        argv,
        usage=_USAGE,
        about="Print the bytes of a model in training at each ZeRO stage.",
    )
    if config.model is not None:
        params = count_parameters(config.model, trust_remote_code=config.trust_remote_code)
    else:
        params = parse_count(config.params or "", "--params")
    lines = [
        f"{params:,} parameters on {config.nodes} machines with {config.gpus} processes each",
        "GB on each process, bf16 with AdamW, without activations:",
    ]
    for stage in range(4):
        kinds = engine_bytes(params, world=config.gpus * config.nodes, stage=stage)
        shown = [f"{kind} {size / 2**30:.2f}" for kind, size in kinds.items()]
        total = sum(kinds.values()) / 2**30
        lines.append(f"  stage {stage}: {', '.join(shown)}; total {total:.2f}")
    say("\n".join(lines))


if __name__ == "__main__":
    run_main(main)
