"""The plan of a run in words: commands, inputs, outputs, settings, memory."""

import shlex
from collections.abc import Iterator

from pipeline.budget.ladder import trained_models
from pipeline.budget.text import table
from pipeline.config import StepConfig, TrainedModelConfig
from pipeline.launch.commands import node_command, step_words
from pipeline.plan.inputs import model_paths
from pipeline.plan.memory import chosen_settings, memory_of, refusals
from pipeline.plan.plan import Plan
from pipeline.plan.request import Stage


def describe_plan(plan: Plan) -> str:
    """What `--dry-run` prints."""
    steps = "step" if len(plan.stages) == 1 else "steps"
    lines = [
        f"The plan: {len(plan.stages)} {steps}, {plan.where}, into"
        f" {plan.request.output_dir}. Nothing is run."
    ]
    for stage in plan.stages:
        lines += ["", *_step(plan, stage)]
    lines += ["", *chosen_settings(plan)] if plan.chosen else []
    lines += ["", *_memory(plan)]
    if plan.request.plan != "off":
        lines += [f"\nThis would be refused: {sentence}" for sentence in refusals(plan)]
    return "\n".join(lines)


def describe_memory(plan: Plan) -> str:
    """The table of what the steps take."""
    return "\n".join(_memory(plan))


def _memory(plan: Plan) -> Iterator[str]:
    yield "Memory of each process, the largest micro-batch counted"
    for stage in plan.stages:
        yield ""
        yield stage.name
        yield from table(memory_of(plan, stage), plan.machine)


def _step(plan: Plan, stage: Stage) -> Iterator[str]:
    config = plan.configs[stage.name]
    done = " (finished, skipped)" if stage.name in plan.finished else ""
    yield f"Step {stage.number}: {stage.name}{done}"
    yield f"  command    {shlex.join(plan.command(stage))}"
    if plan.where.by in ("ssh", "hand"):
        yield from _on_each_machine(plan, stage)
    for name, path in model_paths(config):
        yield f"  {name:<10} {path}"
    for role, model in trained_models(config).items():
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
