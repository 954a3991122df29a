"""The three-stage plan: which steps run, in which order, on what, in how many processes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.budget.fixes import Settings
from pipeline.budget.machine import Machine
from pipeline.config import StepConfig
from pipeline.launch.commands import step_command, step_environment
from pipeline.launch.layout import Layout
from pipeline.launch.local import PLANNED
from pipeline.plan.output import MARK
from pipeline.plan.request import Request
from pipeline.plan.stage import Stage


@dataclass(frozen=True)
class Plan:
    """What a run will do."""

    request: Request

    stages: tuple[Stage, ...]
    """The steps asked for, in order."""

    configs: Mapping[str, StepConfig]
    """Settings by the name of the step; of all steps."""

    finished: frozenset[str]
    """Names of the steps that `--resume` skips."""

    where: Layout
    """Where the processes of each step run."""

    machine: Machine
    """What one of their machines has."""

    chosen: Mapping[str, Settings]
    """What `--plan auto` chose, by the prefix of the stage."""

    all_stages: tuple[Stage, ...]
    """Every step there is, of several methods with a step of each."""

    given: Mapping[str, frozenset[str]]
    """Dotted names of the settings that the command line says, by the name of the step."""

    @property
    def processes(self) -> int | None:
        """Processes of each step under torchrun; None runs one without it."""
        return self.where.processes

    def moved(self, where: Layout) -> "Plan":
        """The plan with its processes in another place, at a port that is free for one."""
        request = self.request
        if where.port != self.where.port:
            request = replace(request, master_port=where.port)
        return replace(self, where=where, request=request)

    def config_file(self, stage: Stage) -> Path:
        """The step's resolved settings."""
        return self.request.output_dir / stage.name / MARK

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of the steps, which look at memory themselves where the plan can't."""
        environment = step_environment(self.where, self.request)
        has_looked = self.machine.is_known or self.request.plan == "off"
        return {**environment, PLANNED: "1"} if has_looked else environment

    def command(self, stage: Stage) -> list[str]:
        """What runs the step."""
        return step_command(stage.module, self.config_file(stage), self.where, self.request)
