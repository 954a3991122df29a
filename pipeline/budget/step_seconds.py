"""Seconds of an optimizer step by arithmetic, to compare ways of dividing the processes.

Operations over the peak, the time that stages of a pipeline wait for each other, and bytes over the
bandwidth of the links that they take: of hidden states within layers and between stages, of
gradients and weights between those that share a model's states, and of what lies in main memory.
Passes that learn are counted; what a step does besides is about the same however it is divided.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import nn

from pipeline.budget.flops import ModelFlops, model_flops
from pipeline.budget.machine import Machine
from pipeline.budget.models import CountedModel
from pipeline.budget.speed import EFFICIENCY, LAUNCH, gpu_speed
from pipeline.budget.states import device_of
from pipeline.config import TrainedModelConfig, Workload
from pipeline.config.zero import ZeroConfig
from pipeline.engine.volumes import Volumes, step_volumes
from pipeline.parallel.schedules import bubble

WITHIN: Mapping[str, float] = {
    "V100": 150,
    "A100": 300,
    "A800": 200,
    "H100": 450,
    "H200": 450,
    "H20": 450,
    "B200": 900,
}
"""GB/s that a GPU sends to others of its machine, and receives at the same time, by NVIDIA's data
sheets of NVLink; other cards do so through the bus of the machine."""

BUS, AWAY = 25.0, 50.0
"""GB/s of that bus, and between machines, for each GPU."""

PEAK = 100e12
"""Operations a second of a card without a data sheet here."""

SATURATED = 256
"""Tokens of a pass that take as long as half as many: matrices keep a GPU busy from some thousand
tokens on, and those of a divided layer from so many times more."""

HIDDEN = 0.5
"""Share of the computation beside which a GPU sends gradients and gathers weights."""

OPTIMIZER = 28
"""Bytes of main memory that AdamW reads and writes for each parameter: a gradient, a master weight
and two moments, of which all but the gradient are written, in fp32."""

HOST = 20.0
"""Assumed bandwidth of main memory for each process, in GB/s."""


@dataclass(frozen=True)
class Links:
    """What a process can do in a second, on the safe side."""

    operations: float

    within: float
    """Bytes to other processes of its machine, and from them at the same time."""

    away: float
    """Bytes to other machines."""

    message: float
    """Seconds that each exchange takes, however short."""

    launch: float = 0.0
    """Seconds that a block takes at least in a forward pass."""

    saturated: int = 0
    """Tokens of a pass at which the device is half busy (`SATURATED`); 0 is busy with any."""

    hides: float = 0.0
    """Share of the computation beside which what is sent takes no time (`HIDDEN`)."""

    bus: float = 1e9 * BUS
    """Bytes between a GPU and main memory."""


def links_of(machine: Machine, card: str = "") -> Links:
    """The links between the processes of a machine.

    A processor's are rough: there, trials tell more (`--autotune`).

    Args:
        machine: where they are.
        card: what its GPUs are called, as `--plan-for` or nvidia-smi have it.
    """
    if not machine.has_gpu:
        return Links(operations=5e10, within=2e9, away=1e9, message=3e-4)
    speed = gpu_speed(card)
    within = next((WITHIN[name] for name in WITHIN if name.lower() in card.lower()), BUS)
    return Links(
        operations=EFFICIENCY * (PEAK if speed is None else speed.peak),
        within=1e9 * within,
        away=1e9 * AWAY,
        message=2e-5,
        launch=LAUNCH,
        saturated=SATURATED,
        hides=HIDDEN,
    )


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of an optimizer step of one process, by what takes them."""

    computing: float = 0.0

    waiting: float = 0.0
    """For other stages of a pipeline."""

    layers: float = 0.0
    """Exchanging hidden states within layers that processes compute together."""

    edges: float = 0.0
    """Handing them, and their gradients, from stage to stage."""

    states: float = 0.0
    """Reducing gradients and gathering weights, but for what is hidden by the computation."""

    main_memory: float = 0.0
    """Bringing states there and back, and updating them there."""

    @property
    def total(self) -> float:
        """Seconds of everything together."""
        return sum(getattr(self, each.name) for each in fields(self))

    def __add__(self, other: "StepSeconds") -> "StepSeconds":
        names = [each.name for each in fields(self)]
        return StepSeconds(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def __str__(self) -> str:
        shown = {
            each.name.replace("_", " "): getattr(self, each.name)
            for each in fields(self)
            if getattr(self, each.name) >= 0.005 * self.total
        }
        parts = ", ".join(f"{seconds:.2g} {name}" for name, seconds in shown.items())
        return f"{self.total:.2g} s, of which {parts}"


def step_seconds(
    models: Sequence[CountedModel], workload: Workload, machine: Machine, links: Links
) -> StepSeconds:
    """Seconds of an optimizer step whose rows are all of the full length.

    Args:
        models: of the step, those without a module left out.
        workload: what it does.
        machine: what it runs on.
        links: what its processes can do.
    """
    counts = (
        _Count(model, model.trained, workload, machine, links)
        for model in models
        if model.trained is not None
    )
    return sum((each.seconds() for each in counts), StepSeconds())


@dataclass(frozen=True)
class _Count:
    """The seconds of one model that learns."""

    model: CountedModel
    settings: TrainedModelConfig
    workload: Workload
    machine: Machine
    links: Links

    def seconds(self) -> StepSeconds:
        """Seconds of all passes and the update of an optimizer step."""
        parallel = self.workload.parallel
        computing = self.computing()
        share = bubble(parallel.schedule, parallel.pp, self.workload.micro_batches, parallel.chunks)
        return StepSeconds(
            computing=computing,
            waiting=computing * share / (1 - share),
            layers=self.layers(),
            edges=self.edges(),
            states=max(0.0, self.states() - self.links.hides * computing),
            main_memory=self.main_memory(),
        )

    @property
    def passes(self) -> int:
        return self.workload.micro_batches

    @property
    def tokens(self) -> int:
        """Tokens of an optimizer step on each process, or on those with the parts of a model."""
        workload = self.workload
        return workload.share * workload.sequences_per_row * workload.length

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states of the step's tokens behind one block."""
        config = self.model.plain.config.get_text_config()
        return self.tokens * config.hidden_size * (4 if self.settings.precision == "fp32" else 2)

    @property
    def blocks(self) -> float:
        """The number of blocks of a process."""
        return _flops(self.model.present).layers / self.workload.parallel.pp

    @property
    def parts(self) -> int:
        """Processes that have the parts of a model."""
        return self.workload.parallel.pp * self.workload.parallel.tp

    def computing(self) -> float:
        """Seconds of products of matrices, and at least of launching them."""
        recomputes = self.settings.gradient_checkpointing
        flops = _flops(self.model.present)
        each = flops.train(self.workload.length, recomputes=recomputes)
        of_pass = self.workload.sequences * self.workload.length
        busy = 1 + self.links.saturated * self.workload.parallel.tp / of_pass
        products = self.tokens * each * busy / (self.parts * self.links.operations)
        forward = 4 if recomputes else 3
        return max(products, self.passes * self.blocks * forward * self.links.launch)

    def layers(self) -> float:
        """Attention and the MLP of each block gather hidden states, or sum them.

        With tokens of its own a process receives, of the hidden states, (tp - 1) / tp in the
        forward pass to gather them, as much to sum what it computes, and three times as much in the
        backward pass; without, twice the sum of (tp - 1).
        """
        tp = self.workload.parallel.tp
        if tp == 1:
            return 0.0
        by_tokens = self.workload.parallel.sequence
        times, messages = (5 * (tp - 1) / tp, 5) if by_tokens else (2.0 * (tp - 1), 2)
        if self.settings.gradient_checkpointing:
            times, messages = times * (7 if by_tokens else 3) / (5 if by_tokens else 2), 7
        received = 2 * self.blocks * times * self.hidden_bytes
        exchanges = 2 * self.blocks * messages * self.passes
        return received / self.links.within + exchanges * self.links.message

    def edges(self) -> float:
        """A chunk between two others hands on hidden states, and back their gradients."""
        parallel = self.workload.parallel
        if parallel.pp == 1:
            return 0.0
        leaves = self.workload.world > self.machine.processes
        speed = self.links.away if leaves else self.links.within
        each = self.hidden_bytes / speed + self.passes * self.links.message
        return 2 * parallel.chunks * each

    def states(self) -> float:
        """What the engine sends by its own layout, each process its part of the model."""
        workload, replicas = self.workload, self.workload.parallel.replicas
        if workload.shards * replicas == 1:
            return 0.0
        device = device_of(self.machine)
        stage, zero = self.settings.zero_stage, self.settings.zero
        moved = _volumes(self.model.present, stage, zero, workload.shards, replicas, device)
        count = self.passes if self.settings.zero_stage == 3 else 1
        within = self.passes * moved.reduce_scatter + count * moved.all_gather
        within = within * (workload.shards - 1) / workload.shards
        over = self.passes * moved.sent_over(replicas)
        # Those that share states are neighbours, as many as one copy has of each part.
        leaves = workload.shards * workload.parallel.tp > self.machine.processes
        stage_leaves = workload.world // workload.parallel.pp > self.machine.processes
        speeds = [self.links.away if each else self.links.within for each in (leaves, stage_leaves)]
        units = self.passes * self.blocks * (3 if self.settings.zero_stage == 3 else 1)
        sent = within / speeds[0] + over / speeds[1]
        return sent / self.parts + units * self.links.message

    def main_memory(self) -> float:
        """Offloaded gradients and weights on their way, and the optimizer's work there."""
        offload, seconds = self.settings.zero.offload, 0.0
        if not self.machine.has_gpu:
            return seconds
        params = list(self.model.present.parameters())
        trained = sum(each.numel() for each in params if each.requires_grad) / self.parts
        if offload.optimizer != "none":
            own = trained / self.workload.shards
            seconds += own * (OPTIMIZER / (1e9 * HOST) + (4 + 2) / self.links.bus)
        if offload.gradients != "none":
            seconds += (self.passes - 1) * 4 * trained / self.workload.shards / self.links.bus
        if offload.params != "none":
            weights = sum(each.nbytes for each in params) / self.workload.shards
            seconds += 2 * self.passes * weights / self.links.bus
        return seconds


@functools.lru_cache(maxsize=64)
def _flops(model: nn.Module) -> ModelFlops:
    return model_flops(model)


@functools.lru_cache(maxsize=512)
def _volumes(
    model: nn.Module,
    stage: Literal[0, 1, 2, 3],
    zero: ZeroConfig,
    shards: int,
    replicas: int,
    device: torch.device,
) -> Volumes:
    """The volumes of a step of one micro-batch."""
    settings = TrainedModelConfig(zero_stage=stage, zero=zero)
    return step_volumes(model, settings, world=shards, replicas=replicas, device=device)
