"""How a command line becomes a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeline.budget.fixes import Settings, nested
from pipeline.budget.machine import Machine, parse_machine, this_machine
from pipeline.cli import say, split_options
from pipeline.launch.commands import devices_of
from pipeline.launch.layout import Host, Layout, is_this_machine, layout
from pipeline.launch.local import list_gpus
from pipeline.plan.help import train_help
from pipeline.plan.inputs import check_inputs
from pipeline.plan.methods import check_sections_run, side_by_side
from pipeline.plan.output import RESULT, finished_steps, recorded_methods
from pipeline.plan.plan import Plan
from pipeline.plan.request import Request, given_rewards, parse_request
from pipeline.plan.resolve import given_settings, resolve_run, step_configs
from pipeline.plan.stage import Stage, without_unchosen
from pipeline.settings.build import Layer


def make_plan(argv: Sequence[str], stages: Sequence[Stage]) -> Plan:
    """The plan for a command line; reads the output directory and changes nothing.

    `--help` prints and exits with code 0.

    Raises:
        UserError: an option, an input or the output directory can't be used.
    """
    for name, words in split_options(argv):
        if name == "help":
            say(train_help(stages, words))
            raise SystemExit(0)
    command_line = parse_request(argv, stages)
    request = command_line.request
    known, out = stages, request.output_dir
    left = {each.name for each in known if (out / each.name / RESULT).is_file()}
    chosen_stages = without_unchosen(known, request.step, left)
    stages = side_by_side(chosen_stages, request.method, recorded_methods(out, known))
    check_sections_run(command_line.overrides, given_rewards(request), stages, known)
    made = {each.number for each in stages if (out / each.name / RESULT).is_file()}
    command_line = replace(command_line, made=frozenset(made))
    if request.plan_for is not None:
        machine = parse_machine(request.plan_for)
        where = _imagined(machine)
    else:
        where = layout(request)
        machine = _machine(where, request)
    command_line, configs = resolve_run(command_line, stages, known=known, world=machine.world)
    request = command_line.request
    chosen: Mapping[str, Settings] = {}
    if request.plan == "auto":
        # It counts bytes with PyTorch, which takes seconds to load.
        from pipeline.plan.auto import choose

        chosen = choose(command_line, stages, machine)
        layers = {name: Layer(nested(each), "--plan auto") for name, each in chosen.items()}
        configs = step_configs(command_line, stages, world=machine.world, chosen=layers)
    finished = finished_steps(request, stages, configs, known=known)
    check_inputs(request, stages, configs)
    requested = tuple(stage for stage in stages if stage.number in request.step)
    return Plan(
        request=request,
        stages=requested,
        configs=configs,
        finished=frozenset(finished),
        where=where,
        machine=machine,
        chosen=chosen,
        all_stages=tuple(stages),
        given={stage.name: given_settings(command_line, stage, stages) for stage in stages},
    )


def _machine(where: Layout, request: Request) -> Machine:
    """This machine, where it is one of those of the job, which are taken to be like it."""
    if where.by == "process":
        return this_machine(processes=1, world=1, gpus=list_gpus()[:1])
    each = max(len(host.slots) for host in where.hosts)
    world = where.processes or 1
    own = _own_host(where, request)
    if own is not None:
        return this_machine(processes=each, world=world, gpus=devices_of(own, request))
    return Machine(each, world, None, None, "each machine of the job", unread_gpus=True)


def _own_host(where: Layout, request: Request) -> Host | None:
    """The host that is this machine; None where `train.py` runs outside the job."""
    if where.by in ("node", "hand"):
        return where.hosts[request.node_rank or 0]
    own = (host for host in where.hosts if is_this_machine(host.name.rpartition("@")[2]))
    return next(own, None)


def _imagined(machine: Machine) -> Layout:
    """Processes on machines that are not there."""
    slots = tuple(range(machine.processes))
    if machine.world == 1:
        return Layout("process")
    if machine.world == machine.processes:
        return Layout("node", (Host("localhost", slots),))
    count = machine.world // machine.processes
    hosts = tuple(Host(f"machine {number}", slots) for number in range(count))
    return Layout("hand", hosts, count)
