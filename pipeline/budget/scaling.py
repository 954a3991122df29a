"""How the cost of training grows with model, length and GPUs: `python -m pipeline.budget.scaling`.

Arithmetic alone; nothing is measured, and nothing but a model's configuration is read. Bytes are
those of the plan, operations are counted by the shapes of matrices, volumes by the engine's layout.
Seconds follow from two assumptions that can be set: the share of a GPU's peak that computation
reaches, and the bandwidth between machines.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pipeline.budget.machine import GIB, parse_machine
from pipeline.budget.speed import PEAK
from pipeline.cli import run_main, say
from pipeline.command import read_command
from pipeline.config import LoraConfig, ModelUse, ParallelConfig, TrainedModelConfig, Workload
from pipeline.errors import require
from pipeline.installation import MODULE

if TYPE_CHECKING:
    from torch import nn

EACH = 8
"""GPUs of a machine."""

Stage = Literal[0, 1, 2, 3]


@dataclass(frozen=True, kw_only=True)
class ScalingConfig:
    """What is trained, on how many GPUs."""

    model: str = "meta-llama/Llama-3.1-8B"
    """Hugging Face model id or directory; only its configuration is read."""

    gpus: tuple[int, ...] = (8, 64, 256, 1024)
    """GPUs in all; machines have 8."""

    card: str = "H100-80GB"
    """Kind of the GPUs, by the names that --plan-for of train.py takes."""

    stages: tuple[Stage, ...] = (0, 1, 2, 3)
    """ZeRO stages."""

    tokens_per_gpu: int = 16384
    """Of an optimizer step on each GPU; micro-batches have one sequence."""

    length: int = 2048
    """Tokens of a sequence."""

    gradient_checkpointing: bool = True
    """Recompute activations."""

    copies: bool = False
    """Keep a sharded copy of the model on each machine (HSDP, --replicas of train.py)."""

    lora: int | None = None
    """Rank of adapters, with the model frozen; null trains all weights."""

    efficiency: float = 0.4
    """Share of the GPU's peak that computation reaches."""

    bandwidth: float = 50.0
    """GB/s (10**9) that each GPU sends to other machines, and receives."""

    def __post_init__(self) -> None:
        card = self.card.partition("-")[0].upper()
        require(card in PEAK, f"card {self.card} is of none of the kinds {', '.join(PEAK)}")
        require(all(gpus > 0 for gpus in self.gpus), "gpus must be above 0")
        require(
            not self.copies or all(gpus % min(gpus, EACH) == 0 for gpus in self.gpus),
            f"copies keeps one on each machine of {EACH} GPUs: gpus must be multiples of {EACH}",
        )
        require(
            self.tokens_per_gpu % self.length == 0 < self.length,
            f"tokens_per_gpu {self.tokens_per_gpu} must be whole sequences of length {self.length}",
        )
        require(0 < self.efficiency <= 1, f"efficiency must lie in (0, 1], got {self.efficiency}")
        require(self.bandwidth > 0, f"bandwidth must be above 0, got {self.bandwidth}")

    @property
    def peak(self) -> float:
        """Operations a second of a GPU."""
        return 1e12 * PEAK[self.card.partition("-")[0].upper()]

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one sequence each in an optimizer step."""
        return self.tokens_per_gpu // self.length


@dataclass(frozen=True)
class Scaled:
    """One optimizer step at one ZeRO stage on that many GPUs."""

    gpus: int
    stage: Stage

    num_bytes: int
    """On each GPU at the highest moment."""

    fits: bool

    unknown: tuple[str, ...]
    """What could not be counted, a sentence each."""

    sent: int
    """Bytes that each GPU sends."""

    sent_away: int
    """Of these to other machines."""

    computing: float
    """Seconds, as assumed."""

    sending: float | None
    """Seconds, as assumed; what runs beside the computation is hidden by it. None where all GPUs
    are in one machine."""


def scale(config: ScalingConfig) -> Iterator[Scaled]:
    """Each number of GPUs at each stage.

    Raises:
        ConfigError: there is no such card, or no such model.
    """
    import torch

    from pipeline.budget.flops import model_flops
    from pipeline.budget.step import workload_memory
    from pipeline.engine.volumes import step_volumes

    model = _module(config)
    operations = config.tokens_per_gpu * model_flops(model).train(
        config.length, recomputes=config.gradient_checkpointing
    )
    for gpus in config.gpus:
        each = min(gpus, EACH)
        replicas = gpus // each if config.copies else 1
        machine = replace(parse_machine(f"{each}x{config.card}"), world=gpus)
        for stage in config.stages:
            settings = replace(_settings(config), zero_stage=stage)
            workload = Workload(
                world=gpus,
                parallel=ParallelConfig(replicas=replicas),
                models=(ModelUse(role="model", settings=settings, keeps_best=True),),
                iteration_rows=config.micro_batches * gpus,
                batch_size=config.micro_batches * gpus,
                micro_batch_size=1,
                length=config.length,
                targets=config.length - 1,
                uniform=True,
            )
            memory = workload_memory(workload, machine=machine)
            moved = step_volumes(
                model,
                settings,
                world=gpus // replicas,
                replicas=replicas,
                device=torch.device("cuda"),
                micro_batches=config.micro_batches,
            )
            num_bytes = memory.peak("device")
            within, over = moved.sent(gpus // replicas), moved.sent_over(replicas)
            away = over if replicas > 1 else within
            yield Scaled(
                gpus=gpus,
                stage=stage,
                num_bytes=num_bytes,
                fits=num_bytes <= (machine.gpu_bytes or 0),
                unknown=memory.unknown,
                sent=within + over,
                sent_away=0 if gpus <= EACH else away,
                computing=operations / (config.peak * config.efficiency),
                sending=None if gpus <= EACH else away / (1e9 * config.bandwidth),
            )


def main(argv: Sequence[str]) -> None:
    """Print the table."""
    config = read_command(
        ScalingConfig,
        argv,
        usage=f"{MODULE} pipeline.budget.scaling [--model NAME] [--gpus N ...] [--card CARD]",
        about="How memory, operations and communication of a training step grow, by arithmetic.",
    )
    say("\n".join([*_about(config), "", *_table(config)]))


def _about(config: ScalingConfig) -> Iterator[str]:
    from pipeline.budget.flops import model_flops

    model = _module(config)
    flops = model_flops(model)
    each = flops.train(config.length, recomputes=config.gradient_checkpointing)
    hours = 1e9 * each / (config.peak * config.efficiency) / 3600
    weights = sum(param.numel() for param in model.parameters())
    share = 4 * flops.layers * flops.width * config.length / flops.forward(config.length)
    yield (
        f"{config.model}: {weights / 1e9:.2f}B parameters; {each / 1e9:.1f} GFLOP for each token to"
        f" train, {flops.forward(config.length) / 1e9:.1f} to read it, at length {config.length};"
        f" {100 * share:.0f} % of that is attention"
    )
    yield (
        f"a billion tokens take {hours:,.0f} hours of one {config.card} at"
        f" {100 * config.efficiency:g} % of its peak, {config.peak / 1e12:g} TFLOP/s"
    )
    yield (
        f"a step of {config.tokens_per_gpu} tokens on each GPU, in {config.micro_batches}"
        f" micro-batches of one sequence; {config.bandwidth:g} GB/s to other machines"
    )


def _table(config: ScalingConfig) -> Iterator[str]:
    yield f"{'GPUs':>5} {'stage':>5} {'GiB on each':>12} {'':8} {'sent by each':>12} " + (
        f"{'computing':>10} {'sending':>9}"
    )
    unknown: dict[str, None] = {}
    for row in scale(config):
        yield (
            f"{row.gpus:>5} {row.stage:>5} {row.num_bytes / GIB:>12.1f}"
            f" {'fits' if row.fits else 'too much':8} {row.sent / 1e9:>9.1f} GB"
            f" {row.computing:>8.2f} s {_seconds(row.sending):>9}"
        )
        unknown |= dict.fromkeys(row.unknown)
    yield from unknown


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"


def _settings(config: ScalingConfig) -> TrainedModelConfig:
    return TrainedModelConfig(
        path=config.model,
        precision="bf16",
        gradient_checkpointing=config.gradient_checkpointing,
        lora=None if config.lora is None else LoraConfig(rank=config.lora),
    )


def _module(config: ScalingConfig) -> "nn.Module":
    import torch

    from pipeline.models.meta import model_on_meta

    return model_on_meta(_settings(config), task="causal", device=torch.device("cuda"))


if __name__ == "__main__":
    run_main(main)
