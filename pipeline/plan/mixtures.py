"""The mixtures of settings that `--plan auto` chooses from, and their order."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.budget.fallbacks import (
    CHECKPOINTING,
    OFFLOADED,
    WEIGHTS_OFFLOADED,
    Settings,
    changed,
    micro_batches,
    of_models,
)
from pipeline.budget.machine import Machine
from pipeline.budget.mesh_sizes import MeshSizes
from pipeline.budget.models import models_of
from pipeline.budget.step_seconds import links_of, step_seconds
from pipeline.config import ParallelConfig, StepConfig
from pipeline.errors import ConfigError

MOST = 16384
"""Tokens of a pass, above which larger ones are not faster."""

PART = 1.05
"""By how much models that are cut must be faster, for each doubling of their parts: what is not cut
has less that can go wrong, and these are estimates."""


@dataclass(frozen=True)
class Mixture:
    """Settings of the models that learn, and of how processes share them, by dotted name."""

    values: tuple[tuple[str, object], ...]

    parts: int
    """Processes that have the parts of a model."""

    rows: tuple[int, ...]
    """Of micro-batches, that are tried, the most first; none where they are given."""

    @property
    def every(self) -> list[Settings]:
        """The settings with each micro-batch."""
        values = dict(self.values)
        return [{**values, "micro_batch_size": rows} for rows in self.rows] or [values]

    @property
    def least(self) -> Settings:
        """With the smallest micro-batch."""
        return self.every[-1]


@dataclass(frozen=True)
class Ranked:
    """A mixture with a micro-batch."""

    mixture: Mixture
    settings: Settings


def mixtures(
    config: StepConfig, machine: Machine, sizes: MeshSizes, *, fixed: Collection[str] = ()
) -> Iterator[Mixture]:
    """All of them; of those that take as long, what takes more memory comes first.

    Args:
        config: the step's settings as they are.
        machine: where it runs.
        sizes: how processes can be divided.
        fixed: dotted names of settings that stay as they are.
    """
    length = config.workload(machine.world).length
    for pp, tp, replicas in sizes.combinations(machine.world):
        mesh = {"parallel.pp": pp, "parallel.tp": tp, "parallel.replicas": replicas}
        data = machine.world // (pp * tp)
        most = max(1, min(-(-config.batch_size // data), MOST // length))
        for states in _states(data // replicas, has_gpu=machine.has_gpu):
            settings = {**_other_than(config.parallel, mesh), **of_models(config, states)}
            values = tuple((name, each) for name, each in settings.items() if name not in fixed)
            rows = () if "micro_batch_size" in fixed else tuple(micro_batches(most))
            yield Mixture(values, pp * tp, rows)


def _other_than(present: ParallelConfig, mesh: Mapping[str, int]) -> Settings:
    """The settings of the mixture that are not there already."""
    return {
        name: value
        for name, value in mesh.items()
        if getattr(present, name.rpartition(".")[2]) != value
    }


def _states(shards: int, *, has_gpu: bool) -> Iterator[Settings]:
    """ZeRO stages, recomputation and offload, for models whose states so many processes share.

    Stages 0 and 1 take more memory than 2, and send as much.
    """
    for recomputation in ({}, CHECKPOINTING):
        for stage in (2, 3) if shards > 1 else (0,):
            yield {"zero_stage": stage, **recomputation}
            if has_gpu:
                yield {"zero_stage": stage, **recomputation, **OFFLOADED}
        if has_gpu:
            yield {**recomputation, **WEIGHTS_OFFLOADED}


def ranked(
    every: Iterable[Mixture],
    config: StepConfig,
    machine: Machine,
    card: str,
    origins: Mapping[str, str],
) -> Sequence[Ranked]:
    """The mixtures that can be, with their micro-batches, the fastest first; each once.

    Args:
        every: the mixtures.
        config: the step's settings as they are.
        machine: where they run.
        card: what its GPUs are called.
        origins: for a directory that an earlier step has yet to fill, the model it starts from.
    """
    links, found = links_of(machine, card), dict[tuple[object, ...], tuple[float, Ranked]]()
    for mixture in every:
        for settings in mixture.every:
            try:
                made = changed(config, settings)
                made.parallel.check(machine.world)
            except ConfigError:  # they contradict each other, or what the user set
                continue
            workload = made.workload(machine.world)
            models = models_of(workload, origins, has_gpu=machine.has_gpu)
            seconds = step_seconds(models, workload, machine, links).total
            cut = PART ** (mixture.parts.bit_length() - 1)
            key = (mixture.values, workload.rows)  # a step may have fewer rows
            found.setdefault(key, (seconds * cut, Ranked(mixture, settings)))
    return [each for _, each in sorted(found.values(), key=lambda pair: pair[0])]
