"""Describe the plan of a run: commands, models, data, steps, time, memory.

The time of a step is a coarse estimate from the number of operations: two per weight and token for
a forward pass, four for a backward pass (two if only adapters are trained), at a fraction of the
device's peak, with a minimum time per block and pass. The responses of a group share their prompt.
Unknown quantities, such as the length of responses, are taken from the settings. The result is
accurate within a factor of two or three.
"""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from pipeline.budget.fit import shortage_message, trained_models
from pipeline.budget.machine import data_sheet_flops, describe_machine, measure_flops
from pipeline.budget.memory import memory_summary, memory_table
from pipeline.budget.models import CountedModel, build_models
from pipeline.config import StepConfig
from pipeline.launch.commands import launch_command, node_command
from pipeline.launch.local import query_gpus
from pipeline.parallel.schedules import bubble_fraction
from pipeline.plan.checks import Preview
from pipeline.plan.inputs import model_paths
from pipeline.plan.plan import Plan
from pipeline.plan.stage import Stage
from pipeline.settings.fields import to_options, unflatten
from pipeline.system.errors import counted
from pipeline.system.installation import ROOT
from pipeline.system.threads import cores_per_process

RESPONSE_FRACTION = 0.6
"""Mean length of a response, as a fraction of the maximum."""

STARTUP_SECONDS = 12.0
"""Seconds for imports, loading and export."""

EFFICIENCY = 0.35
"""Fraction of the peak that computation reaches."""

BLOCK_SECONDS = 1e-3
"""Minimum seconds per block in a forward pass; a backward pass takes twice as long."""

ESTIMATE_RANGE = (0.5, 2.5)
"""Factors that turn an estimate into the shortest and the longest expected time."""


def estimate_speed(plan: Plan) -> tuple[float, str] | None:
    """Return a process's estimated speed in FLOP/s and its basis, or None if unknown."""
    share = f"{EFFICIENCY:.0%} of"
    if plan.machine.has_gpu:
        name = plan.request.plan_for or " ".join(gpu.name for gpu in query_gpus())
        known = data_sheet_flops(name)
        if known is None:
            return None
        peak, card = known
        return EFFICIENCY * peak, f"{share} the {card}'s peak of {peak / 1e12:.0f} TFLOP/s"
    peak = measure_flops()
    basis = f"{share} the {peak / 1e9:.0f} GFLOP/s that a matrix product reaches on this CPU"
    return EFFICIENCY * peak / max(plan.machine.processes / cores_per_process(1), 1.0), basis


def estimate(plan: Plan, stage: Stage, preview: Preview, flops: float) -> float | str:
    """Return a step's duration in seconds at `flops` FLOP/s, or the reason why it is unknown."""
    config, data, prompt_tokens = plan.configs[stage.name], preview.data, preview.row_tokens
    steps = preview.steps(config)
    if data is None:
        return "unknown until the rows are read"
    if prompt_tokens is None or steps is None:
        return "unknown until the tokenizer exists"
    work = config.workload(plan.machine.world)
    models, unknown = build_models(work, plan.origins, has_gpu=plan.machine.has_gpu)
    if unknown:
        return "unknown until the models exist"
    generation = work.generation
    new_tokens = RESPONSE_FRACTION * generation.new_tokens if generation is not None else 0.0
    row = prompt_tokens + (new_tokens if work.generates_first else 0.0)
    group = generation.group_size if generation is not None else 1

    def forward(model: CountedModel, rows: int, times: int = 1) -> float:
        """Estimate the duration of `times` forward passes over `rows` rows, in seconds."""
        capacity = work.micro_batch_size * work.length * work.sequences_per_row
        min_seconds = max(1, math.ceil(rows * row / capacity)) * model.shape.layers * BLOCK_SECONDS
        is_scorer = model.use.scores and model.trained is None
        tokens = rows * row if is_scorer else rows * (row - (1 - 1 / group) * prompt_tokens)
        return times * max(min_seconds, tokens * 2 * model.parameters / flops)

    def generate(prompts: int, group: int = 1) -> float:
        """Estimate the duration of generating responses to the prompts, in seconds."""
        model = next((m for m in models if generation and m.role == generation.role), None)
        if generation is None or model is None:
            return 0.0
        passes = -(-prompts // max(1, min(generation.slots, prompts))) * new_tokens
        all_tokens = prompts * (prompt_tokens / group + new_tokens)
        return max(
            passes * model.shape.layers * BLOCK_SECONDS, all_tokens * 2 * model.parameters / flops
        )

    rows, held_out = (
        -(-count // work.world) for count in (work.iteration_rows, preview.held_out(config))
    )
    evaluations = steps // config.eval_every if config.eval_every else 1
    idle = bubble_fraction(work.parallel.pp, work.micro_batches)
    trained = [model for model in models if model.trained is not None]
    seconds = STARTUP_SECONDS
    for model in trained:
        assert model.trained is not None
        passes = (2 if model.trained.lora else 3) + model.trained.gradient_checkpointing
        passes = work.epochs * passes - work.reuses_forward
        seconds += steps * forward(model, rows, times=passes) / (1 - idle)
    seconds += steps * sum(forward(model, rows, times=model.use.scoring_passes) for model in models)
    if work.generates_first:  # greedy and sampled before and after; the base only sampled
        full_evaluations = 4 + any(model.use.comparison_only for model in models)
        if work.rollouts is None:
            seconds += steps * generate(rows, group)
        else:  # at the same time as training
            seconds = max(seconds, STARTUP_SECONDS + steps * generate(work.rollouts.count, group))
        seconds += full_evaluations * generate(held_out)
        return seconds + evaluations * generate(min(rows, held_out))
    seconds += (1 + evaluations) * forward(trained[0], held_out)
    return seconds + (generate(generation.count) if generation is not None else 0.0)


def with_spread(seconds: float) -> str:
    """Format an estimate with its range, such as `5 min (2.5 min to 12 min)`."""
    shortest, longest = (_format_estimate(seconds * factor) for factor in ESTIMATE_RANGE)
    return f"{_format_estimate(seconds)} ({shortest} to {longest})"


def _format_estimate(seconds: float) -> str:
    """Format an estimated number of seconds as `40 s`, `5 min`, `3.5 h` or `2.1 days`."""
    for unit, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 1.5 * unit:
            number = seconds / unit
            return f"{number:.0f} {name}" if number >= 10 else f"{number:.2g} {name}"
    return f"{seconds:.0f} s"


WIDTH = 100


def describe_plan(plan: Plan, previews: Mapping[str, Preview] | None = None) -> str:
    """Return the text of `--dry-run`, with data statistics of each step that will run."""
    previews = previews or {}
    lines = [
        f"The plan: {counted(len(plan.stages), 'step')}, {plan.layout}, into"
        f" {plan.request.output_dir}. Nothing is run.",
        *plan.notes,
    ]
    times: list[float] = []
    speed = estimate_speed(plan) if previews else None
    for stage in plan.stages:
        lines += ["", *_describe_step(plan, stage)]
        if stage.name in previews:
            preview = previews[stage.name]
            lines += _describe_data(plan.configs[stage.name], preview)
            time = "unknown: no peak performance is recorded for this GPU"
            if speed is not None:
                time = estimate(plan, stage, preview, speed[0])
            times += [] if isinstance(time, str) else [time]
            lines.append(
                _line("time", time if isinstance(time, str) else f"about {with_spread(time)}")
            )
    if times and speed is not None:
        left_out = "" if len(times) == len(plan.stages) else " for the steps whose time is known"
        total = with_spread(sum(times)).replace(" (", " in all (", 1)
        lines += ["", f"About {total}{left_out}.", f"Estimated from {speed[1]}."]
        if plan.machine.world > 1:
            lines.append("Excludes communication between processes.")
    lines += ["", *chosen_settings(plan)] if plan.chosen else []
    lines += ["", *_describe_commands(plan), ""]
    lines.append("Memory of each process, for the largest micro-batch")
    for stage in plan.stages:
        lines += ["", stage.name, *memory_table(plan.memory(stage), plan.machine)]
    if plan.request.plan != "off":
        lines += [f"\nThis would fail: {message}" for message in memory_errors(plan)]
    return "\n".join(lines)


def memory_lines(plan: Plan) -> Iterator[str]:
    """Yield the machine's memory, a line per step, and the choice of `--plan auto`."""
    yield f"memory: {describe_machine(plan.machine)}"
    for stage in plan.unfinished:
        yield f"  {stage.title} takes {memory_summary(plan.memory(stage), plan.machine)}"
    if plan.chosen:
        yield from chosen_settings(plan)


def chosen_settings(plan: Plan) -> Iterator[str]:
    """Yield the choice of `--plan auto` as a settings file."""
    yield "chosen by --plan auto; as a file for --config:"
    dotted = {f"{k}.{name}": v for k, group in plan.chosen.items() for name, v in group.items()}
    text = yaml.safe_dump(unflatten(dotted), sort_keys=False)
    yield from (f"  {line}" for line in text.splitlines())


def memory_errors(plan: Plan) -> Iterator[str]:
    """Yield an error message for each unfinished step that can't fit in memory."""
    for stage in plan.unfinished:
        config, memory = plan.configs[stage.name], plan.memory(stage)
        names = stage.title, stage.prefix
        message = shortage_message(*names, config, plan.machine, plan.origins, memory)
        yield from [message] if message else []


def _describe_step(plan: Plan, stage: Stage) -> Iterator[str]:
    config = plan.configs[stage.name]
    done = " (finished, skipped)" if stage.name in plan.finished else ""
    yield f"Step {stage.number}: {stage.name}{done}"
    trained = trained_models(config)
    for name, path in model_paths(config):
        role = name.partition(".")[0]
        text = path
        if role in trained:
            targets = vars(trained[role].zero.offload)
            kinds = ("optimizer", "gradients", "params")
            offloaded = [f"{kind} to {targets[kind]}" for kind in kinds if targets[kind] != "none"]
            text += f", ZeRO stage {trained[role].zero_stage}"
            text += f", offloaded: {', '.join(offloaded)}" if offloaded else ""
        yield _line(role, text)
    parallel, work = config.parallel, config.workload(plan.machine.world)
    labels = {"pp": "stages", "tp": "processes per layer", "replicas": "replicas"}
    parts = [f"{n} {text}" for name, text in labels.items() if (n := getattr(parallel, name)) > 1]
    if parallel.pp > 1:
        idle = bubble_fraction(parallel.pp, work.micro_batches)
        parts.append(f"{work.micro_batches} micro-batches per step: stages idle {idle:.0%}")
    if parts:
        yield _line("parallel", ", ".join(parts))
    if work.generates_first and (method := getattr(config, "method", None)):
        yield _line("method", method)
    split = f", split {','.join(f'{part:g}' for part in config.data.split)}"
    yield _line("data", f"{' '.join(config.data.path)}{split if config.reads_dialogues else ''}")
    limit = config.max_steps
    plural = "" if config.epochs == 1 else "s"
    length = counted(limit, "step") if limit else f"{config.epochs:g} epoch{plural}"
    yield _line(
        "training",
        f"{length}, batch {config.batch_size} in micro-batches of {config.micro_batch_size}, length"
        f" {work.length}, seed {config.seed}",
    )


def _describe_data(config: StepConfig, preview: Preview) -> Iterator[str]:
    """Yield lines on the step's rows, optimizer steps and tokens."""
    if preview.data is None:
        yield _line("rows", f"unknown: {preview.unread}")
        return
    rows = len(preview.data.train)
    yield _line("rows", f"{rows:,} to train on, {preview.held_out(config):,} held out")
    yield from (_line("", note) for note in preview.data.notes if not note.startswith("step "))
    work, steps, tokens = config.workload(1), preview.steps(config), preview.row_tokens
    if steps is None:
        return
    epochs = steps * work.data_rows / rows
    kind = "iteration" if work.generates_first else "optimizer step"
    passes = f"{epochs:.2g}" if epochs < 10 else f"{epochs:,.0f}"
    batch = counted(work.data_rows, "row")
    passes += " pass" if passes == "1" else " passes"
    yield _line("steps", f"{counted(steps, kind)} of {batch}: {passes} over the rows")
    if tokens is not None:
        total = _format_count(tokens * work.data_rows * steps)
        yield _line("tokens", f"{tokens:.0f} per row, {total} in all")


def _describe_commands(plan: Plan) -> Iterator[str]:
    """Yield the command of each step, with the settings that differ from the step's defaults."""
    yield "Equivalent commands, step by step"
    if Path.cwd() != ROOT:
        yield f"  export PYTHONPATH={shlex.quote(str(ROOT))}"
    for stage in plan.unfinished:
        config = plan.configs[stage.name]
        options = [
            word
            for name, words in to_options(config)
            if name.partition(".")[0] not in config.unused_roles
            for word in (f"--{name}", *words)
        ]
        words = ["-m", stage.module, *options]
        yield ""
        yield from _wrap_command(launch_command(words, plan.layout, plan.request))
        if plan.layout.launcher == "ssh":
            for rank, host in enumerate(plan.layout.hosts):
                yield f"  on {host.name}"
                slots = ",".join(str(slot) for slot in host.slots)
                shown = [] if host.has_first_slots else [f"CUDA_VISIBLE_DEVICES={slots}"]
                yield from _wrap_command([*shown, *node_command(words, plan.layout, rank)])


def _wrap_command(words: Sequence[str]) -> Iterator[str]:
    """Yield a command wrapped with line continuations, keeping options with their values."""
    groups: list[str] = []
    for word in words:
        quoted = word if word.startswith("CUDA_VISIBLE_DEVICES=") else shlex.quote(word)
        if groups and not word.startswith("--"):
            groups[-1] += f" {quoted}"
        else:
            groups.append(quoted)
    current = f"  {groups[0]}"
    for group in groups[1:]:
        if len(current) + len(group) + 3 > WIDTH:
            yield f"{current} \\"
            current = f"    {group}"
        else:
            current += f" {group}"
    yield current


def _line(name: str, text: str) -> str:
    return f"  {name:<10} {text}".rstrip()


def _format_count(number: float) -> str:
    """Format a number as `850`, `12.3 thousand` or `4.5 million`."""
    for unit, name in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f}"
