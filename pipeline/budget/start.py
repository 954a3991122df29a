"""The look at memory of a step that is started by itself, not by `train.py`."""

import os

from pipeline.budget.fit import shortage
from pipeline.budget.machine import Machine, this_machine
from pipeline.budget.suggest_fix import refusal, suggest_fix
from pipeline.budget.table import StepMemory
from pipeline.budget.tp_sizes import tp_sizes
from pipeline.cli import remark, say
from pipeline.config import StepConfig
from pipeline.errors import ConfigError
from pipeline.launch.local import PLANNED, list_gpus
from pipeline.parallel import launched


def check_memory(config: StepConfig, *, section: str) -> None:
    """Say what the step takes, on the first process, and refuse what can't fit.

    Where `train.py` has done so for all steps, or skips it, this only logs which number formats are
    slow on this machine.

    Raises:
        ConfigError: it names what the step takes, what there is, and the cheapest change.
    """
    if launched.rank() != 0:
        return
    from pipeline.models.number_formats import slow_formats

    if advice := slow_formats(config, section=section):
        remark(advice)
    if PLANNED in os.environ:
        return
    from pipeline.budget.step import step_memory
    from pipeline.budget.text import line, there

    def count(config: StepConfig, machine: Machine) -> StepMemory:
        return step_memory(config, machine=machine)

    processes = launched.local_world_size()
    machine = this_machine(
        processes=processes, world=launched.world_size(), gpus=list_gpus()[:processes]
    )
    memory = count(config, machine)
    short = shortage(memory, machine)
    if short is not None:
        sizes = tp_sizes(config, processes=machine.processes)
        fix = suggest_fix(config, machine, count, tp_sizes=sizes)
        raise ConfigError(refusal("this step", "", short, fix))
    say(f"memory: {there(machine)}; this step takes {line(memory, machine)}")
