"""The plan of a run in words: commands, inputs, outputs, settings, memory."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import fields

from pipeline.config import StepConfig, TrainedModelConfig
from pipeline.launch.commands import node_command, step_words
from pipeline.launch.local import count_gpus
from pipeline.launch.memory_table import Row, memory_rows
from pipeline.plan.inputs import model_paths
from pipeline.plan.plan import Plan
from pipeline.plan.request import Stage

ROW = "{:<10} {:<28} {:>10} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}"
WORKING = ("gradient_buffers", "gathered")
UNITS = {"GiB": 2**30, "MiB": 2**20}


def describe_plan(plan: Plan) -> str:
    """What `--dry-run` prints."""
    steps = "step" if len(plan.stages) == 1 else "steps"
    lines = [
        f"The plan: {len(plan.stages)} {steps}, {plan.where}, into"
        f" {plan.request.output_dir}. Nothing is run."
    ]
    for stage in plan.stages:
        lines += ["", *_step(plan, stage)]
    return "\n".join([*lines, "", *_memory(plan)])


def describe_memory(plan: Plan) -> str:
    """The table of what the models take."""
    return "\n".join(_memory(plan))


def _memory(plan: Plan) -> Iterator[str]:
    gpus, origins = count_gpus(), _origins(plan)
    tables = {
        stage.name: memory_rows(
            plan.configs[stage.name],
            origins,
            section=stage.section,
            world=plan.processes or 1,
            gpus=gpus,
        )
        for stage in plan.stages
    }
    rows = [row for table in tables.values() for row in table]
    largest = max((max(row.on_device, row.offloaded) for row in rows), default=0)
    unit = "GiB" if largest >= UNITS["GiB"] else "MiB"
    offload = any(row.offloaded for row in rows)
    yield f"Memory on each process in {unit}, without activations and KV cache"
    yield ""
    names = ("weights", "masters", "gradients", "moments", "buffers")
    head = ROW.format("role", "model", "parameters", *names, "total")
    yield head + f" {'offloaded':>9}" if offload else head
    for name, table in tables.items():
        yield name
        yield from (_row(row, unit, offload=offload) for row in table)
        if all(row.parameters is not None for row in table):
            sizes = [sum(row.on_device for row in table)]
            sizes += [sum(row.offloaded for row in table)] if offload else []
            together = " ".join(f"{size / UNITS[unit]:>9.1f}" for size in sizes)
            yield f"{'':<10} {'together':<88} {together}"
    yield ""
    yield "buffers: gradients on their way, and at stage 3 the weights gathered at a time"


def _step(plan: Plan, stage: Stage) -> Iterator[str]:
    config = plan.configs[stage.name]
    done = " (finished, skipped)" if stage.name in plan.finished else ""
    yield f"Step {stage.number}: {stage.name}{done}"
    yield f"  command    {shlex.join(plan.command(stage))}"
    if plan.where.by in ("ssh", "hand"):
        yield from _on_each_machine(plan, stage)
    for name, path in model_paths(config):
        yield f"  {name:<10} {path}"
    for role, model in _trained(config):
        yield f"  {role:<10} ZeRO stage {model.zero_stage}{_offload(model)}"
    yield f"  data       {' '.join(config.data.path)}, split {_split(config)}"
    yield f"  output     {config.output_dir}"
    length = f"{config.max_steps} steps" if config.max_steps else f"{config.epochs:g} epoch(s)"
    yield (
        f"  training   {length}, batch {config.batch_size} in micro-batches of"
        f" {config.micro_batch_size}, length {_length(config)}, seed {config.seed}"
    )


def _on_each_machine(plan: Plan, stage: Stage) -> Iterator[str]:
    """What runs on each machine, or can be typed there."""
    where, request = plan.where, plan.request
    words = step_words(stage.module, plan.config_file(stage), where)
    for rank, host in enumerate(where.hosts):
        line = shlex.join(node_command(words, where, rank, request))
        if not host.is_whole:
            line = f"CUDA_VISIBLE_DEVICES={','.join(str(slot) for slot in host.slots)} {line}"
        yield f"  on {host.name:<7} {line}"


def _trained(config: StepConfig) -> Iterator[tuple[str, TrainedModelConfig]]:
    for field in fields(config):
        model = getattr(config, field.name)
        if isinstance(model, TrainedModelConfig):
            yield field.name, model


def _offload(model: TrainedModelConfig) -> str:
    """What leaves the device: ", offloaded: optimizer to cpu, params to nvme"."""
    offload = model.zero.offload
    places = {
        "optimizer": offload.optimizer,
        "gradients": offload.gradients,
        "params": offload.params,
    }
    away = [f"{name} to {place}" for name, place in places.items() if place != "none"]
    return f", offloaded: {', '.join(away)}" if away else ""


def _length(config: StepConfig) -> int:
    """Tokens of the longest sequence: in step 3 prompt and response, which it names itself."""
    return getattr(config, "max_length", config.data.max_length)


def _split(config: StepConfig) -> str:
    return ",".join(f"{part:g}" for part in config.data.split)


def _origins(plan: Plan) -> Mapping[str, str]:
    """For each step's output the model it starts from."""
    configs = plan.configs.values()
    paths = {str(config.output_dir): dict(model_paths(config)) for config in configs}
    return {out: models["model.path"] for out, models in paths.items() if "model.path" in models}


def _row(row: Row, unit: str, *, offload: bool) -> str:
    path = row.path if len(row.path) <= 28 else "..." + row.path[-25:]
    if row.parameters is None:
        return f"{row.role:<10} {path:<28} unknown (not downloaded)"
    kinds = (("weights",), ("masters",), ("gradients",), ("moments",), WORKING)
    sizes = [*(row.sum(*each) for each in kinds), row.on_device]
    cells = [f"{size / UNITS[unit]:.1f}" for size in sizes]
    line = ROW.format(row.role, path, f"{row.parameters / 1e6:,.1f}M", *cells)
    return line + f" {row.offloaded / UNITS[unit]:>9.1f}" if offload else line
