"""`--plan auto`: settings that fit, the fastest by arithmetic first.

Each way to divide the processes, with each ZeRO stage, recomputing or not, each offload and each
micro-batch, takes seconds by `pipeline.budget.step_seconds`; the first in their order that fits is
taken. What the user set stays as it is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pipeline.budget.fallbacks import Settings, changed
from pipeline.budget.fit import shortage
from pipeline.budget.machine import Machine
from pipeline.budget.mesh_sizes import mesh_sizes
from pipeline.budget.step import step_memory
from pipeline.budget.table import StepMemory
from pipeline.budget.text import there
from pipeline.budget.tp_sizes import tp_sizes
from pipeline.config import StepConfig
from pipeline.errors import ConfigError, ModelError, require
from pipeline.launch.local import gpu_names
from pipeline.plan.memory import origins_of
from pipeline.plan.mixtures import Mixture, mixtures, ranked
from pipeline.plan.request import CommandLine
from pipeline.plan.resolve import step_config, step_configs, user_settings
from pipeline.plan.stage import Stage

MARGIN = 0.9
"""Share of the memory that is planned with: allocators leave holes."""


def choose(
    command_line: CommandLine, stages: Sequence[Stage], machine: Machine
) -> Mapping[str, Settings]:
    """Settings by the prefix of their stage, for the steps asked for.

    Raises:
        ModelError: the size of a model is not known.
        ConfigError: the memory of the machines is not known.
    """
    require(
        machine.is_known,
        f"--plan auto can't choose, for {there(machine)}; name the machine with --plan-for, as"
        " --plan-for 8xA100-80GB, and run with the file of settings that this prints",
    )
    origins = origins_of(step_configs(command_line, stages, world=machine.world))
    return {
        stage.prefix: _Choice(command_line, stages, stage, machine, origins).settings()
        for stage in stages
        if stage.number in command_line.request.step
    }


@dataclass(frozen=True)
class _Choice:
    """The search for one step's settings."""

    command_line: CommandLine
    stages: Sequence[Stage]
    stage: Stage
    machine: Machine
    origins: Mapping[str, str]

    def settings(self) -> Settings:
        """The settings of the fastest that fits; nothing where nothing does."""
        _, memory = self.with_settings({})
        if memory.unknown:
            raise ModelError(
                f"--plan auto can't choose for {self.stage.title}: {memory.unknown[0]}"
            )
        sizes = mesh_sizes(self.base, self.machine, origins=self.origins)
        every = mixtures(self.base, self.machine, sizes, fixed=self.given)
        fits: dict[Mixture, bool] = {}
        for each in ranked(every, self.base, self.machine, self.card, self.origins):
            # The smallest micro-batch says whether any of them fits.
            if each.mixture not in fits:
                fits[each.mixture] = self.fitting(each.mixture.least) is not None
            found = self.fitting(each.settings) if fits[each.mixture] else None
            if found is not None:
                return found
        return {}

    def fitting(self, given: Settings) -> Settings | None:
        """The settings, with a way to generate, if they fit."""
        for settings in self.variants(given):
            try:
                config, memory = self.with_settings(settings)
            except (ConfigError, ModelError):  # it contradicts what the user set, or the family
                continue
            short = shortage(memory, self.tight)
            if short is None:
                return {**settings, **self.answers(config, memory)}
            if short.phase.name != "generate":  # other ways to generate won't help
                return None
        return None

    def variants(self, settings: Settings) -> Iterator[Settings]:
        """Ways to generate, the fastest first: by as few processes together as fit."""
        if not self.base.workload(self.machine.world).generates_first:
            yield settings
            return
        for offloads in (False, True) if self.machine.has_gpu else (False,):
            for processes in self.tp_sizes:
                how = {"inference_tp_size": processes, "offload_in_generation": offloads}
                yield {**settings, **self.free(how)}

    @cached_property
    def tp_sizes(self) -> tuple[int, ...]:
        """Numbers of processes that can generate together."""
        return tp_sizes(self.base, processes=self.machine.processes, origins=self.origins)

    def answers(self, config: StepConfig, memory: StepMemory) -> Settings:
        """The responses at once that the keys and values have room for."""
        generation = config.workload(self.machine.world).generation
        if generation is None or generation.phase != "each iteration":
            return {}
        generate = next(phase for phase in memory.phases if phase.name == "generate")
        least = [item for item in generate.items if item.least is not None]
        taken = generate.least().peak("device") - sum(item.least or 0 for item in least)
        room = self.tight.gpu_bytes or (self.tight.host_bytes or 0) // self.machine.processes
        count = (room - taken) // sum(item.least or 0 for item in least)
        return self.free({"generation_batch_size": max(1, min(count, generation.most_at_once))})

    def with_settings(self, settings: Settings) -> tuple[StepConfig, StepMemory]:
        """The step's settings with these, and what it takes then."""
        config = changed(self.base, settings)
        config.parallel.check(self.machine.world, section=self.stage.prefix)
        return config, step_memory(config, machine=self.machine, origins=self.origins)

    def free(self, settings: Settings) -> Settings:
        """The settings that the user has not given."""
        return {name: value for name, value in settings.items() if name not in self.given}

    @cached_property
    def base(self) -> StepConfig:
        """The step's settings as they are."""
        world = self.machine.world
        return step_config(self.stage, self.command_line, self.stages, world=world)

    @cached_property
    def given(self) -> frozenset[str]:
        """Dotted names of the settings that the user has given."""
        world = self.machine.world
        return user_settings(self.stage, self.command_line, self.stages, world=world)

    @cached_property
    def card(self) -> str:
        """What the GPUs are called."""
        return self.command_line.request.plan_for or " ".join(gpu_names())

    @property
    def tight(self) -> Machine:
        """The machine without the memory that is held back."""
        gpu, host = self.machine.gpu_bytes, self.machine.host_bytes
        return replace(
            self.machine,
            gpu_bytes=None if gpu is None else int(MARGIN * gpu),
            host_bytes=None if host is None else int(MARGIN * host),
        )
