"""`--plan auto`: settings that fit, the fastest first.

It goes through the options of `pipeline.budget.fallbacks` to the first that has room for a pass of
enough tokens to keep a device at work, and takes the largest micro-batch there. What the user set
stays as it is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pipeline.budget.fallbacks import Settings, micro_batches, nested, of_models, options
from pipeline.budget.fit import shortage
from pipeline.budget.machine import Machine
from pipeline.budget.step import step_memory
from pipeline.budget.table import StepMemory
from pipeline.budget.text import there
from pipeline.budget.tp_sizes import tp_sizes
from pipeline.config import StepConfig
from pipeline.errors import ConfigError, ModelError, require
from pipeline.plan.memory import origins_of
from pipeline.plan.request import CommandLine
from pipeline.plan.resolve import step_config, step_configs
from pipeline.plan.stage import Stage
from pipeline.settings.build import Layer

ENOUGH = 2048
"""Tokens of a pass, above which larger ones are hardly faster."""

MOST = 16384
"""Tokens of a pass, above which they are not."""

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
        """The first option with room enough, else the one with room for most."""
        config, memory = self.with_settings({})
        if memory.unknown:
            raise ModelError(
                f"--plan auto can't choose for {self.stage.title}: {memory.unknown[0]}"
            )
        length = config.workload(self.machine.world).length
        most = max(1, min(-(-config.batch_size // self.machine.world), MOST // length))
        best: Settings = {}
        best_size = 0
        for option in options(world=self.machine.world, has_gpu=self.machine.has_gpu):
            found = self.largest(of_models(config, option), micro_batches(most))
            if found is None:
                continue
            settings, size = found
            if size > best_size:
                best, best_size = settings, size
            if size == most or size * length >= ENOUGH:
                break
        return best

    def largest(self, option: Settings, sizes: Sequence[int]) -> tuple[Settings, int] | None:
        """The option with the largest micro-batch that fits, and its size."""
        most, *smaller = sizes
        found = self.fitting(option, most)
        if found is not None or not smaller:
            return found
        *between, least = smaller
        smallest = self.fitting(option, least)
        if smallest is None:
            return None
        return next(filter(None, (self.fitting(option, size) for size in between)), smallest)

    def fitting(self, option: Settings, size: int) -> tuple[Settings, int] | None:
        """The option with this micro-batch, if it fits."""
        for settings in self.variants({**option, "micro_batch_size": size}):
            try:
                config, memory = self.with_settings(settings)
            except ConfigError:  # it contradicts what the user set
                continue
            short = shortage(memory, self.tight)
            if short is None:
                chosen = {**settings, **self.answers(config, memory)}
                config, _ = self.with_settings(chosen)
                return _heeded(chosen, config), config.micro_batch_size
            if short.phase.name != "generate":  # other ways to generate won't help
                return None
        return None

    def variants(self, settings: Settings) -> Iterator[Settings]:
        """Ways to generate, the fastest first: by as few processes together as fit."""
        config, _ = self.with_settings({})
        if not config.workload(self.machine.world).generates_first:
            yield settings
            return
        for offloads in (False, True) if self.machine.has_gpu else (False,):
            for processes in self.tp_sizes:
                yield {
                    **settings,
                    "inference_tp_size": processes,
                    "offload_in_generation": offloads,
                }

    @cached_property
    def tp_sizes(self) -> tuple[int, ...]:
        """Numbers of processes that can generate together."""
        config, _ = self.with_settings({})
        return tp_sizes(config, processes=self.machine.processes, origins=self.origins)

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
        return {"generation_batch_size": max(1, min(count, generation.most_at_once))}

    def with_settings(self, settings: Settings) -> tuple[StepConfig, StepMemory]:
        """The step's settings with these below the user's, and what it takes then."""
        config = step_config(
            self.stage,
            self.command_line,
            self.stages,
            world=self.machine.world,
            chosen=Layer(nested(settings), "--plan auto"),
        )
        memory = step_memory(config, machine=self.machine, origins=self.origins)
        return config, memory

    @property
    def tight(self) -> Machine:
        """The machine without the memory that is held back."""
        gpu, host = self.machine.gpu_bytes, self.machine.host_bytes
        return replace(
            self.machine,
            gpu_bytes=None if gpu is None else int(MARGIN * gpu),
            host_bytes=None if host is None else int(MARGIN * host),
        )


def _heeded(settings: Settings, config: StepConfig) -> Settings:
    """Without those for which the user's own value stands."""

    def value(name: str) -> object:
        section: Any = config
        for part in name.split("."):
            section = getattr(section, part)
        return section

    return {name: each for name, each in settings.items() if value(name) == each}
