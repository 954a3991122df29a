"""The plan of a run in words: commands, models, data, steps, time, memory."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pipeline.budget.fit import table
from pipeline.budget.fixes import trained_models
from pipeline.config import RowShare, StepConfig, TrainedModelConfig
from pipeline.installation import ROOT
from pipeline.launch.commands import launch_command, node_command, step_words
from pipeline.parallel.schedules import bubble, drawn
from pipeline.plan.checks import contexts
from pipeline.plan.estimate import SPREAD, Estimate, estimate, in_words, speed_of
from pipeline.plan.inputs import model_paths
from pipeline.plan.memory import chosen_settings, crowded, memory_of, refusals, saving
from pipeline.plan.plan import Plan
from pipeline.plan.preview import Preview, rows_of_a_step
from pipeline.plan.stage import Stage
from pipeline.settings.plain import as_options

WIDTH = 100

MOST_STAGES, MOST_COLUMNS = 16, 76
"""Stages and columns of a timetable that are drawn at most."""


def describe_plan(plan: Plan, previews: Mapping[str, Preview] | None = None) -> str:
    """What `--dry-run` prints, with what is known of the data of each step that is to run."""
    previews = previews or {}
    steps = "step" if len(plan.stages) == 1 else "steps"
    lines = [
        f"The plan: {len(plan.stages)} {steps}, {plan.where}, into"
        f" {plan.request.output_dir}. Nothing is run."
    ]
    times: list[Estimate] = []
    speed = speed_of(plan) if previews else None
    for stage in plan.stages:
        lines += ["", *_step(plan, stage)]
        if stage.name in previews:
            config, preview = plan.configs[stage.name], previews[stage.name]
            lines += [*_data(config, preview), *_cut(plan, stage)]
            unknown = "not known for GPUs of which there is no data sheet here"
            time = unknown if speed is None else estimate(plan, stage, preview, speed)
            lines.append(_line("time", str(time)))
            times += [time] if isinstance(time, Estimate) else []
    if times and speed is not None:
        lines += ["", *_total(times, plan, speed.basis)]
    lines += ["", *chosen_settings(plan)] if plan.chosen else []
    lines += ["", *_commands(plan), "", *_memory(plan)]
    lines += [f"\n{note}" for note in crowded(plan)]
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
    trained = trained_models(config)
    for name, path in model_paths(config):
        role = name.partition(".")[0]
        how = f", ZeRO stage {trained[role].zero_stage}" if role in trained else ""
        yield _line(role, f"{path}{how}{_offload(trained[role]) if role in trained else ''}")
    yield from _mesh(config, plan.machine.world)
    yield from _method(config)
    split = f", split {_split(config)}" if config.reads_dialogues else ""
    yield _line("data", f"{' '.join(config.data.path)}{split}")
    length = f"{config.max_steps} steps" if config.max_steps else f"{config.epochs:g} epoch(s)"
    yield _line(
        "training",
        f"{length}, batch {config.batch_size} in micro-batches of {config.micro_batch_size}, length"
        f" {_length(config)}, seed {config.seed}",
    )
    for number, text in enumerate(saving(plan, stage)):
        yield _line("" if number else "saving", text)


def _mesh(config: StepConfig, world: int) -> Iterator[str]:
    """How the processes are divided, where they are."""
    replicas, shards = config.parallel.replicas, config.workload(world).shards
    yield from _stages(config, world)
    if config.parallel.tp > 1:
        groups = world // config.parallel.tp
        where = f", in {groups} groups" if groups > 1 else ""
        own = ", hidden states shared out by tokens" if config.parallel.sequence else ""
        together = f"{config.parallel.tp} processes compute each layer together"
        yield _line("tensor", f"{together}{where}{own}")
    if replicas > 1:
        each = "one process" if shards == 1 else f"{shards} processes, which share its states"
        yield _line("parallel", f"{replicas} replicas of each model that learns, each of {each}")


def _stages(config: StepConfig, world: int) -> Iterator[str]:
    """The pipeline, with a timetable of its first stages by the unit of a forward pass."""
    parallel, workload = config.parallel, config.workload(world)
    if parallel.pp == 1:
        return
    count = workload.micro_batches
    of_steps = f"{count} micro-batches of a step on each of {workload.data_processes}"
    waits = f"stages wait {bubble(parallel.pp, count):.0%} of the time"
    yield _line("pipeline", f"{parallel.pp} stages, {of_steps}: {waits}")
    for number, row in enumerate(drawn(parallel.pp, count)[:MOST_STAGES]):
        yield _line("", f"stage {number} {row[:MOST_COLUMNS]}")


def _method(config: StepConfig) -> Iterator[str]:
    """How a step learns that knows several ways, and from how many responses to a prompt."""
    method, generation = getattr(config, "method", None), config.workload(1).generation
    if method is None or generation is None:
        return
    if not config.workload(1).generates_first:
        share = config.row_share
        parts = "" if share is None else f"{share.use} of the parts of steps {_listed(share)}"
        yield _line("method", f"{method}: learns from {parts}")
        return
    size = generation.group_size
    responses = "one response" if size == 1 else f"{size} responses"
    without = f", without a {' or '.join(sorted(config.unused_roles))}"
    yield _line(
        "method",
        f"{method}: {responses} to each prompt{without if config.unused_roles else ''}",
    )


def _listed(share: RowShare) -> str:
    return " and ".join(map(str, share.of_steps))


def _data(config: StepConfig, preview: Preview) -> Iterator[str]:
    """Rows, optimizer steps and tokens."""
    counts = preview.counts
    if counts is None:
        yield _line("rows", f"not known: {preview.unread}")
        return
    yield _line("rows", f"{counts.train:,} to train on, {counts.held_out:,} held out")
    yield from (_line("", note) for note in counts.notes if not note.startswith("step "))
    steps, epochs, tokens = preview.steps(config), preview.epochs(config), preview.tokens
    if steps is None or epochs is None:
        return
    kind = "iteration" if config.workload(1).generates_first else "optimizer step"
    kind += "" if steps == 1 else "s"
    rows = rows_of_a_step(config)
    passes = f"{epochs:.2g}" if epochs < 10 else f"{epochs:,.0f}"
    passes += " pass" if passes == "1" else " passes"
    yield _line("steps", f"{steps:,} {kind} of {rows:,} rows: {passes} over the rows")
    if tokens is not None:
        total = tokens.row * rows * steps
        cut = f"; {tokens.cut:.0%} of the rows are too long" if tokens.cut else ""
        yield _line("tokens", f"{tokens.row:.0f} a row, {_count(total)} in all{cut}")


def _cut(plan: Plan, stage: Stage) -> Iterator[str]:
    """A line where a model reads less than the step's settings give it."""
    config = plan.configs[stage.name]
    for context in contexts(plan, stage):
        if context.role == "model" and config.data.max_length > context.tokens:
            yield _line("", f"the model reads {context.tokens} tokens: rows are cut there")


def _total(times: Sequence[Estimate], plan: Plan, basis: str) -> Iterator[str]:
    whole = sum(each.seconds for each in times)
    shortest, longest = (whole * factor for factor in SPREAD)
    left_out = "" if len(times) == len(plan.stages) else " for the steps whose time is known"
    yield f"About {in_words(whole)} in all ({in_words(shortest)} to {in_words(longest)}){left_out}."
    yield f"Estimated from {basis}."
    if plan.machine.world > 1:
        yield "What processes send each other is left out."


def _commands(plan: Plan) -> Iterator[str]:
    """What runs each step, with the settings that differ from the step's defaults."""
    yield "The same by hand, step by step"
    if Path.cwd() != ROOT:
        yield f"  export PYTHONPATH={shlex.quote(str(ROOT))}"
    for stage in plan.stages:
        if stage.name in plan.finished:
            continue
        config = plan.configs[stage.name]
        unused = config.unused_roles
        options = [
            word
            for name, words in as_options(config)
            if name.partition(".")[0] not in unused
            for word in (f"--{name}", *words)
        ]
        module, *rest = step_words(stage.module, Path("FILE"), plan.where)[1:]
        words = ["-m", module, *options, *rest[2:]]
        yield ""
        yield from _wrapped(launch_command(words, plan.where, plan.request))
        if plan.where.by in ("ssh", "hand"):
            for rank, host in enumerate(plan.where.hosts):
                yield f"  on {host.name}"
                line = node_command(words, plan.where, rank, plan.request)
                slots = ",".join(str(slot) for slot in host.slots)
                shown = [] if host.is_whole else [f"CUDA_VISIBLE_DEVICES={slots}"]
                yield from _wrapped([*shown, *line])


def _wrapped(words: Sequence[str]) -> Iterator[str]:
    """A command in lines that a shell reads as one, an option with its words kept together."""
    groups: list[str] = []
    for word in words:
        quoted = word if word.startswith("CUDA_VISIBLE_DEVICES=") else shlex.quote(word)
        if groups and not word.startswith("--"):
            groups[-1] += f" {quoted}"
        else:
            groups.append(quoted)
    line = f"  {groups[0]}"
    for group in groups[1:]:
        if len(line) + len(group) + 3 > WIDTH:
            yield f"{line} \\"
            line = f"    {group}"
        else:
            line += f" {group}"
    yield line


def _line(name: str, text: str) -> str:
    return f"  {name:<10} {text}".rstrip()


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


def _count(number: float) -> str:
    """`850`, `12.3 thousand`, `4.5 million`."""
    for unit, name in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f}"
