"""The plan of a run: steps, settings, machines and processes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.budget.machine import Machine, describe_machine, detect_machine, parse_machine
from pipeline.budget.memory import StepMemory, step_memory
from pipeline.config import StepConfig
from pipeline.launch.commands import list_devices, step_command, step_environment
from pipeline.launch.layout import Host, Layout, is_this_machine, resolve_layout
from pipeline.launch.local import PLANNED, list_gpus
from pipeline.plan.inputs import check_inputs
from pipeline.plan.output import MARK, RESULT, finished_steps
from pipeline.plan.request import CommandLine, Request, check_sections_run, parse_request
from pipeline.plan.resolve import EMBEDDED_PRESET, Resolver, resolve_run, step_configs
from pipeline.plan.stage import METHODS, Stage, drop_unselected, split_methods
from pipeline.system.errors import ModelError, require
from pipeline.system.installation import ROOT

Settings = Mapping[str, Any]
"""Values by dotted name, as in a settings file."""


@dataclass(frozen=True)
class Plan:
    """The plan of a run."""

    request: Request

    stages: tuple[Stage, ...]
    """The requested steps, in order."""

    configs: Mapping[str, StepConfig]
    """Settings by step name, of all steps."""

    finished: frozenset[str]
    """Names of the steps that `--resume` skips."""

    layout: Layout
    """Placement of the processes of each step."""

    machine: Machine
    """One of the machines that run the steps; all are assumed to be alike."""

    chosen: Mapping[str, Settings]
    """Settings chosen by `--plan auto`, by stage prefix."""

    user_settings: Mapping[str, frozenset[str]]
    """Dotted names of the settings on the command line, by step name."""

    notes: tuple[str, ...] = ()
    """Notes for the user, such as where models and default settings come from."""

    @property
    def unfinished(self) -> list[Stage]:
        """The requested steps that `--resume` does not skip."""
        return [stage for stage in self.stages if stage.name not in self.finished]

    @property
    def origins(self) -> Mapping[str, str]:
        """The initial model of each step that has the role `model`, by output directory."""
        return get_origins(self.configs)

    def memory(self, stage: Stage, config: StepConfig | None = None) -> StepMemory:
        """Return a step's memory on the plan's machine, with `config` or the plan's settings."""
        config = config or self.configs[stage.name]
        return step_memory(config, machine=self.machine, origins=self.origins)

    def config_file(self, stage: Stage) -> Path:
        """Return the path of the file with the step's resolved settings."""
        return self.request.output_dir / stage.name / MARK

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables of the steps, which check memory themselves if the plan can't."""
        environment = step_environment(self.layout, self.request)
        is_checked = self.machine.is_known or self.request.plan == "off"
        return {**environment, PLANNED: "1"} if is_checked else environment

    def command(self, stage: Stage) -> list[str]:
        """Return the command that runs the step."""
        layout = self.layout
        if layout.launcher == "pod":  # a pod may start a step before pod 0 ends the previous one
            layout = replace(layout, port=layout.port + self.stages.index(stage))
        return step_command(stage.module, self.config_file(stage), layout, self.request)


def get_origins(configs: Mapping[str, StepConfig]) -> Mapping[str, str]:
    """Return the initial model of each step that has the role `model`, by output directory."""
    models = {str(c.output_dir): c.used_models().get("model") for c in configs.values()}
    return {out: str(model.path) for out, model in models.items() if model is not None}


def make_plan(argv: Sequence[str], stages: Sequence[Stage]) -> Plan:
    """Make the plan for a command line; read the output directory, but change nothing.

    Raises:
        UserError: an option, an input or the output directory can't be used.
    """
    command_line = parse_request(argv, stages)
    request, known, out = command_line.request, stages, command_line.request.output_dir
    finished_names = {stage.name for stage in known if (out / stage.name / RESULT).is_file()}
    replaced = _get_replaced_steps(request, known)
    stages = drop_unselected(known, request.step, finished_names, replaced)
    stages = split_methods(stages, request.method)
    check_sections_run(command_line, stages, known)
    finished_numbers = {stage.number for stage in stages if (out / stage.name / RESULT).is_file()}
    command_line = replace(command_line, finished_steps=frozenset(finished_numbers))
    configured = (stage.number for stage in stages if _is_configured(stage, command_line))
    last = max([*request.step, *configured])
    stages = tuple(stage for stage in stages if stage.number <= last)
    target = None if request.plan_for is None else parse_machine(request.plan_for)
    layout = resolve_layout(request) if target is None else _hypothetical_layout(target)
    world = layout.processes or 1
    command_line, configs = resolve_run(command_line, stages, known=known, world=world)
    request = command_line.request
    machine = target or _get_machine(layout, request)
    requested = tuple(stage for stage in stages if stage.number in request.step)
    resolver = Resolver(command_line, stages, world)
    chosen: Mapping[str, Settings] = {}
    if request.plan == "auto":
        chosen = _choose_settings(resolver, requested, configs, machine)
        configs = step_configs(command_line, stages, world=world, chosen=chosen)
    finished = finished_steps(request, stages, configs, known=known)
    check_inputs(request, stages, configs)
    plan = Plan(
        request=request,
        stages=requested,
        configs=configs,
        finished=frozenset(finished),
        layout=layout,
        machine=machine,
        chosen=chosen,
        user_settings={stage.name: resolver.user_settings(stage, files=False) for stage in stages},
    )
    return replace(plan, notes=tuple(_notes(plan, resolver, replaced, known)))


def _is_configured(stage: Stage, command_line: CommandLine) -> bool:
    """Return whether a step has a directory, or settings given by the user."""
    given = {name.partition(".")[0] for name, options in command_line.overrides.items() if options}
    given = given.union(*(file.settings for file in command_line.files))
    is_given = not given.isdisjoint({stage.section, METHODS})
    return is_given or (command_line.request.output_dir / stage.name).exists()


def _get_replaced_steps(request: Request, stages: Sequence[Stage]) -> dict[str, Stage]:
    """Return, by section, the earlier steps without output that a model option replaces."""
    models = {"actor": request.actor_model, "reward": request.reward_model}
    return {
        stage.section: stage
        for stage in stages
        if models.get(stage.options.get(stage.main_role, "")) is not None
        and not stage.on_request
        and stage.number < max(request.step)
        and stage.number not in request.step
        and not (request.output_dir / stage.name / MARK).is_file()
    }


def _notes(
    plan: Plan, resolver: Resolver, replaced: Mapping[str, Stage], known: Sequence[Stage]
) -> Iterator[str]:
    """Yield notes on replaced models, default response lengths, the preset and the upload."""
    models = {step.section: step.models for step in known}
    for stage in plan.stages:
        for role, model in plan.configs[stage.name].used_models().items():
            if earlier := replaced.get(models[stage.section].get(role, "")):
                reason = f"{plan.request.output_dir} has no output of step {earlier.number}"
                yield f"{stage.title} uses {model.path} as its {role}: {reason}"
    for stage in plan.stages:
        if default := resolver.response_length(stage, plan.configs[stage.name]):
            setting, length = f"{stage.section}.max_new_tokens", f"{default[0]:,} tokens"
            yield f"{stage.title} generates up to {length} ({default[1]}): {setting} is not set"
    titles = [stage.title for stage in plan.stages if resolver.has_preset(stage)]
    if titles:
        file = EMBEDDED_PRESET.relative_to(ROOT)
        yield f"preset {file}, for the embedded model: {', '.join(titles)}"
    if plan.request.push_to_hub is not None:
        last, name = plan.stages[-1].title, plan.request.push_to_hub
        yield f"the model of {last} will be uploaded to {name} on the Hub"


def _choose_settings(
    resolver: Resolver, stages: Sequence[Stage], configs: Mapping[str, StepConfig], machine: Machine
) -> Mapping[str, Settings]:
    """Return the choice of `--plan auto`: settings by stage prefix."""
    from pipeline.budget.fit import choose_settings

    require(
        machine.is_known,
        f"--plan auto can't choose settings: {describe_machine(machine)}; specify it with"
        " --plan-for, such as --plan-for 8xA100-80GB, and run with the settings that this prints",
    )
    origins = get_origins(configs)
    chosen: dict[str, Settings] = {}
    for stage in stages:
        config = configs[stage.name]
        unknown = step_memory(config, machine=machine, origins=origins).unknown
        if unknown:
            raise ModelError(f"--plan auto can't choose settings for {stage.title}: {unknown[0]}")
        fixed = resolver.user_settings(stage)
        chosen[stage.prefix] = choose_settings(config, machine, origins, fixed)
    return chosen


def _get_machine(layout: Layout, request: Request) -> Machine:
    """Return this machine if the job uses it, or else one like the job's, with unknown memory."""
    if layout.launcher == "process":
        return detect_machine(processes=1, world=1, gpus=list_gpus()[:1])
    per_host = max(len(host.slots) for host in layout.hosts)
    world = layout.processes or 1
    for host in layout.hosts:
        if layout.launcher in ("node", "pod") or is_this_machine(host.name.rpartition("@")[2]):
            return detect_machine(processes=per_host, world=world, gpus=list_devices(host, request))
    return Machine(per_host, world, None, None, "each machine of the job", has_unknown_gpus=True)


def _hypothetical_layout(machine: Machine) -> Layout:
    """Return the placement of processes on hypothetical machines."""
    slots = tuple(range(machine.processes))
    if machine.world == 1:
        return Layout("process")
    if machine.world == machine.processes:
        return Layout("node", (Host("localhost", slots),))
    hosts = tuple(Host(f"machine {i}", slots) for i in range(machine.world // machine.processes))
    return Layout("ssh", hosts)
