"""The memory check of a step that is started by itself, not by `train.py`."""

import os

from pipeline.cli import remark, say
from pipeline.config import StepConfig
from pipeline.errors import ConfigError
from pipeline.launch.local import PLANNED, list_gpus
from pipeline.parallel import launched


def check_memory(config: StepConfig, *, section: str) -> None:
    """Print the memory that the step takes, on the first process, and refuse what can't fit.

    Under `train.py`, which checks all steps, this only logs which number formats are slow here.

    Raises:
        ConfigError: names the need, the supply, and the cheapest change.
    """
    if launched.rank() != 0:
        return
    from pipeline.models.number_formats import slow_formats

    if advice := slow_formats(config, section=section):
        remark(advice)
    if PLANNED in os.environ:
        return
    from pipeline.budget.fit import describe_machine, line, shortage
    from pipeline.budget.fixes import mesh_sizes, refusal, suggest_fix
    from pipeline.budget.machine import Machine, this_machine
    from pipeline.budget.memory import StepMemory, step_memory

    def count(config: StepConfig, machine: Machine) -> StepMemory:
        return step_memory(config, machine=machine)

    processes = launched.local_world_size()
    world, gpus = launched.world_size(), list_gpus()[:processes]
    machine = this_machine(processes=processes, world=world, gpus=gpus)
    memory = count(config, machine)
    short = shortage(memory, machine)
    if short is not None:
        fix = suggest_fix(config, machine, count, mesh_sizes(config, machine, {}))
        raise ConfigError(refusal("this step", "", short, fix))
    say(f"memory: {describe_machine(machine)}; this step takes {line(memory, machine)}")
