"""The engine for people who bring their own loop, in DeepSpeed's words.

engine, optimizer, loader, scheduler = initialize(
model=model, config="ds_config.json", training_data=dataset, total_steps=1000
)
for batch in loader:
loss = engine(**batch).loss
engine.backward(loss)
engine.step()
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from pipeline.config import LossScaleConfig, OptimConfig, TrainedModelConfig
from pipeline.config.deepspeed.read import read_deepspeed_config
from pipeline.config.zero import OffloadConfig, ZeroConfig
from pipeline.engine.engine import Engine, StepResult
from pipeline.engine.lr import lr_factor
from pipeline.engine.resume import EngineCheckpoints
from pipeline.errors import require
from pipeline.kernels.products.dispatch import take_over_for
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh

logger = logging.getLogger(__name__)

ENDLESS = ("constant", "constant_with_warmup", "warmup", "lr_range_test", "one_cycle", "noam")
"""Schedules that don't ask how long the run is."""

WEIGHTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class LoopEngine:
    """An `Engine` that counts micro-batches: `backward` takes means, `step` acts at the boundary.

    The gradient of a step is the mean over processes and micro-batches of the losses' gradients, as
    in DeepSpeed. Where these are means over unequal numbers of tokens, give the sum and the number
    of tokens of the whole step instead, so that every token weighs the same.
    """

    def __init__(self, engine: Engine, *, accumulation: int) -> None:
        self.engine = engine
        self.accumulation = accumulation
        self.micro_steps = 0
        self.last: StepResult | None = None
        self._checkpoints = EngineCheckpoints(engine)

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self.engine.model

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, skipped ones not counted."""
        return self.engine.steps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run the model's forward pass."""
        return self.engine(*args, **kwargs)

    def backward(self, loss: Float[Tensor, ""], *, divided_by: float | None = None) -> None:
        """Add the gradient of a micro-batch.

        Args:
            loss: a mean over the micro-batch, or a sum where `divided_by` is given.
            divided_by: what the sum over all micro-batches of all processes is divided by.
        """
        count = self.accumulation * self.engine.group.size if divided_by is None else divided_by
        self.engine.backward(loss / count)
        self.micro_steps += 1

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether `step` would update the weights now."""
        return self.micro_steps == self.accumulation

    def step(self) -> StepResult | None:
        """Update the weights if the last micro-batch of a step is in; None where it is not."""
        if not self.is_gradient_accumulation_boundary():
            return None
        self.last = self.engine.step()
        self.micro_steps = 0
        return self.last

    def save_checkpoint(self, directory: str | Path, client_state: Any = None) -> None:  # noqa: ANN401
        """Write the engine's state, and what the caller wants to keep, as JSON has it.

        All processes call it, between two optimizer steps; it returns when the files are there.
        """
        if self.micro_steps:
            raise RuntimeError("save between two optimizer steps, not inside an accumulation")
        self._checkpoints.save(Path(directory), client_state)

    def load_checkpoint(self, directory: str | Path) -> Any:  # noqa: ANN401
        """Go on from the newest checkpoint in `directory` that verifies; its `client_state`.

        The number of processes, the ZeRO stage and the offload may be others than when it was
        written.

        Raises:
            CheckpointError: there is none, or it is of another model.
        """
        self.micro_steps = 0
        return self._checkpoints.load(Path(directory))

    def no_sync(self) -> AbstractContextManager[None]:
        """Postpone reductions, as `Engine.no_sync`."""
        return self.engine.no_sync()

    def gathered(self) -> AbstractContextManager[None]:
        """Have all weights whole, as `Engine.gathered`."""
        return self.engine.gathered()

    def train(self, mode: bool = True) -> None:  # noqa: FBT001, FBT002  # torch's signature
        """Set the model to training mode."""
        self.module.train(mode)

    def eval(self) -> None:
        """Set the model to evaluation mode."""
        self.module.eval()


@dataclass(frozen=True)
class OptimizerView:
    """The engine's optimizers as one; `engine.step()` steps them."""

    engine: Engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Settings of every group, with the rate of the last step."""
        return [group for each in self.engine.groups for group in each.optimizer.param_groups]


@dataclass(frozen=True)
class ScheduleView:
    """The learning rate; `engine.step()` moves it on."""

    engine: Engine

    def get_last_lr(self) -> list[float]:
        """The rate that the next step uses, before any factor of a group."""
        engine = self.engine
        share = lr_factor(engine.steps, total_steps=engine.total_steps, optim=engine.optim)
        return [engine.optim.lr * share]


class Initialized(NamedTuple):
    """What `initialize` returns, in DeepSpeed's order."""

    engine: LoopEngine
    optimizer: OptimizerView
    loader: DataLoader[Any] | None
    scheduler: ScheduleView


def initialize(
    *,
    model: nn.Module,
    config: Mapping[str, Any] | str | Path,
    training_data: Dataset[Any] | Sequence[Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    total_steps: int | None = None,
    seed: int = 0,
) -> Initialized:
    """Take a model into the engine.

    Args:
        model: any module; it is converted to the file's precision and moved to this process's
            device.
        config: a DeepSpeed configuration, as a file or a mapping. docs/deepspeed.md says what
            becomes of each key.
        training_data: rows that the loader hands out in micro-batches, each process its share.
        collate_fn: makes a micro-batch of rows.
        total_steps: optimizer steps of the run, where the schedule is stretched over it.
        seed: of the order of the rows.

    Raises:
        ConfigError: a wrong key or value in `config`.
    """
    given = {} if total_steps is None else {"total_steps": total_steps}
    mesh = current_mesh()
    settings = read_deepspeed_config(config, world=mesh.data.size, given=given)
    notice = settings.notice()
    if notice and mesh.is_main:
        logger.info("%s", notice)
    # Without a scheduler in the file the rate stays what it is, as in DeepSpeed.
    constant = {"optim.schedule": "constant", "optim.warmup_steps": 0}
    trained = model_config(constant | dict(settings.model))
    require(
        total_steps is not None or trained.optim.schedule in ENDLESS,
        f"the schedule {trained.optim.schedule} is stretched over the run: give total_steps",
    )
    _convert(model, WEIGHTS.get(trained.precision))
    micro = settings.step.get("micro_batch_size", 1)
    whole = settings.step.get("batch_size", micro * mesh.data.size)
    take_over_for(model, local_device(), trained.kernels)
    engine = Engine(model, trained, total_steps=total_steps or 1, group=mesh.data)
    loader = None
    if training_data is not None:
        rows = cast("Dataset[Any]", training_data)
        sampler: DistributedSampler[Any] = DistributedSampler(
            rows, num_replicas=mesh.data.size, rank=mesh.data.rank, seed=seed, drop_last=True
        )
        loader = DataLoader(
            rows, batch_size=micro, sampler=sampler, collate_fn=collate_fn, drop_last=True
        )
    return Initialized(
        LoopEngine(engine, accumulation=whole // (micro * mesh.data.size)),
        OptimizerView(engine),
        loader,
        ScheduleView(engine),
    )


def _convert(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Parameters to `dtype`, buffers to the device.

    Buffers keep their type: rotary frequencies in bf16 would turn long contexts by wrong angles.
    The engine itself brings weights to the device, as much of them as a process keeps.
    """
    for param in model.parameters():
        if dtype is not None and param.is_floating_point():
            param.data = param.data.to(dtype)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(local_device()))


def model_config(dotted: Mapping[str, Any]) -> TrainedModelConfig:
    """Settings of a trained model from their dotted names."""
    sections = ("", "zero", "zero.offload", "optim", "fp16")
    parts: dict[str, dict[str, Any]] = {section: {} for section in sections}
    for name, value in dotted.items():
        section, _, leaf = name.rpartition(".")
        parts[section][leaf] = value
    return TrainedModelConfig(
        **parts[""],
        zero=ZeroConfig(offload=OffloadConfig(**parts["zero.offload"]), **parts["zero"]),
        optim=OptimConfig(**parts["optim"]),
        fp16=LossScaleConfig(**parts["fp16"]),
    )
