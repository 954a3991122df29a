"""The three-stage plan: which steps run, in which order, on what, in how many processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.config import StepConfig
from pipeline.launch.commands import step_command
from pipeline.launch.layout import Layout, layout
from pipeline.plan.inputs import check_inputs
from pipeline.plan.output import MARK, finished_steps
from pipeline.plan.request import Request, Stage, parse_request
from pipeline.plan.resolve import step_configs


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

    def command(self, stage: Stage) -> list[str]:
        """What runs the step."""
        return step_command(stage.module, self.config_file(stage), self.where, self.request)


def make_plan(argv: Sequence[str], stages: Sequence[Stage]) -> Plan:
    """The plan for a command line; reads the output directory and changes nothing.

    Raises:
        UserError: an option, an input or the output directory can't be used.
    """
    said = parse_request(argv, stages)
    request = said.request
    where = layout(request)
    configs = step_configs(said, stages, world=where.processes or 1)
    finished = finished_steps(request, stages, configs)
    check_inputs(request, stages, configs)
    chosen = tuple(stage for stage in stages if stage.number in request.step)
    return Plan(request, chosen, configs, frozenset(finished), where)
