"""The ways in which the processes of a step can divide the models that it trains."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.budget.machine import Machine
from pipeline.budget.models import CountedModel, models_of
from pipeline.config import StepConfig
from pipeline.errors import ConfigError, ModelError


@dataclass(frozen=True)
class MeshSizes:
    """Values of `parallel`, each possible by itself."""

    pp: tuple[int, ...] = (1,)
    tp: tuple[int, ...] = (1,)
    replicas: tuple[int, ...] = (1,)

    def combinations(self, world: int) -> Iterator[tuple[int, int, int]]:
        """The combinations of `pp`, `tp` and `replicas` that divide so many processes together.

        Replicas of one process each share nothing, which is ZeRO stage 0 without replicas.
        """
        for pp in self.pp:
            for tp in self.tp:
                shards, left = divmod(world, pp * tp)
                if left:
                    continue
                for replicas in self.replicas:
                    if shards % replicas == 0 and (replicas == 1 or replicas < shards):
                        yield pp, tp, replicas


def mesh_sizes(
    config: StepConfig, machine: Machine, *, origins: Mapping[str, str] | None = None
) -> MeshSizes:
    """What the processes of a machine, and the models of a step, allow.

    Stages and replicas divide all processes, those that compute a layer together the processes of
    one machine, and heads and widths of every model that learns. 1 alone stands where a family
    can't be cut, or isn't known.

    Args:
        config: the step's settings.
        machine: what it runs on.
        origins: for a directory that an earlier step has yet to fill, the model it starts from.
    """
    workload = config.workload(machine.world)
    every = models_of(workload, origins or {}, has_gpu=machine.has_gpu)
    models = [model for model in every if model.trained is not None]
    if machine.world == 1 or any(model.module is None for model in models):
        return MeshSizes()
    return MeshSizes(
        pp=(1, *_stages(models, _divisors(machine.world))),
        tp=(1, *(n for n in _divisors(machine.processes) if _cuts_layers(models, n))),
        replicas=(1, *_divisors(machine.world)[:-1]),  # each shared out by two at least
    )


def _divisors(number: int) -> list[int]:
    """The divisors above 1."""
    return [each for each in range(2, number + 1) if number % each == 0]


def _stages(models: Sequence[CountedModel], sizes: Sequence[int]) -> Iterator[int]:
    """The sizes that are numbers of stages for each model."""
    from pipeline.models.stages import blocks_of, cut_stage

    for size in sizes:
        try:
            for model in models:
                blocks = blocks_of(model.present, size)
                if size == sizes[0]:  # whether the family can be cut at all
                    cut_stage(copy.deepcopy(model.present), number=0, blocks=blocks)
        except (ConfigError, ModelError):
            return
        yield size


def _cuts_layers(models: Sequence[CountedModel], size: int) -> bool:
    """Whether each layer of the models can be divided among that many processes."""
    from pipeline.models.tensor_cut import cut_for_plan

    try:
        for model in models:
            cut_for_plan(copy.deepcopy(model.present), size, sequence=False)
    except (ConfigError, ModelError):
        return False
    return True
