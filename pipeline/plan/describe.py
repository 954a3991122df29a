"""The plan of a run in words: commands, models, data, steps, time, memory."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from pipeline.budget.fit import refusal, trained_models
from pipeline.budget.machine import describe_machine
from pipeline.budget.memory import line, table
from pipeline.config import StepConfig
from pipeline.launch.commands import launch_command, node_command, step_words
from pipeline.parallel.schedules import bubble
from pipeline.plan.estimate import estimate, speed_of, with_spread
from pipeline.plan.inputs import model_paths
from pipeline.plan.plan import Plan
from pipeline.plan.preview import Preview
from pipeline.plan.stage import Stage
from pipeline.settings.fields import as_options, nested
from pipeline.system.installation import ROOT

WIDTH = 100


def describe_plan(plan: Plan, previews: Mapping[str, Preview] | None = None) -> str:
    """What `--dry-run` prints, with what is known of the data of each step that is to run."""
    previews = previews or {}
    steps = "step" if len(plan.stages) == 1 else "steps"
    lines = [
        f"The plan: {len(plan.stages)} {steps}, {plan.where}, into"
        f" {plan.request.output_dir}. Nothing is run."
    ]
    times: list[float] = []
    speed = speed_of(plan) if previews else None
    for stage in plan.stages:
        lines += ["", *_step(plan, stage)]
        if stage.name in previews:
            preview = previews[stage.name]
            lines += _data(plan.configs[stage.name], preview)
            time = "not known for GPUs of which there is no data sheet here"
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
            lines.append("Communication between processes is left out.")
    lines += ["", *chosen_settings(plan)] if plan.chosen else []
    lines += ["", *_commands(plan), "", describe_memory(plan)]
    if plan.request.plan != "off":
        lines += [f"\nThis would be refused: {sentence}" for sentence in refusals(plan)]
    return "\n".join(lines)


def describe_memory(plan: Plan) -> str:
    """The table of what the steps take."""
    lines = ["Memory of each process, the largest micro-batch counted"]
    for stage in plan.stages:
        lines += ["", stage.name, *table(plan.memory(stage), plan.machine)]
    return "\n".join(lines)


def memory_lines(plan: Plan) -> Iterator[str]:
    """The machine's memory, a line for each step, and the choice of `--plan auto`."""
    yield f"memory: {describe_machine(plan.machine)}"
    for stage in plan.stages:
        if stage.name not in plan.finished:
            yield f"  {stage.title} takes {line(plan.memory(stage), plan.machine)}"
    if plan.chosen:
        yield from chosen_settings(plan)


def chosen_settings(plan: Plan) -> Iterator[str]:
    """The choice of `--plan auto` as a file of settings."""
    yield "chosen by --plan auto; as a file for --config:"
    dotted = {f"{at}.{name}": v for at, each in plan.chosen.items() for name, v in each.items()}
    text = yaml.safe_dump(nested(dotted), sort_keys=False)
    yield from (f"  {each}" for each in text.splitlines())


def refusals(plan: Plan) -> Iterator[str]:
    """A sentence for each unfinished step that can't fit its machine."""
    for stage in plan.stages:
        if stage.name not in plan.finished:
            config, memory = plan.configs[stage.name], plan.memory(stage)
            names = stage.title, stage.prefix
            sentence = refusal(*names, config, plan.machine, plan.origins, memory)
            yield from [sentence] if sentence else []


def _step(plan: Plan, stage: Stage) -> Iterator[str]:
    config = plan.configs[stage.name]
    done = " (finished, skipped)" if stage.name in plan.finished else ""
    yield f"Step {stage.number}: {stage.name}{done}"
    trained = trained_models(config)
    for name, path in model_paths(config):
        role = name.partition(".")[0]
        text = path
        if role in trained:
            places = vars(trained[role].zero.offload)
            kinds = ("optimizer", "gradients", "params")
            away = [f"{kind} to {places[kind]}" for kind in kinds if places[kind] != "none"]
            text += f", ZeRO stage {trained[role].zero_stage}"
            text += f", offloaded: {', '.join(away)}" if away else ""
        yield _line(role, text)
    parallel, work = config.parallel, config.workload(plan.machine.world)
    sizes = {"pp": "stages", "tp": "processes to a layer", "replicas": "replicas"}
    shared = [f"{n} {text}" for name, text in sizes.items() if (n := getattr(parallel, name)) > 1]
    if parallel.pp > 1:
        waits = bubble(parallel.pp, work.micro_batches)
        shared.append(f"{work.micro_batches} micro-batches a step: stages wait {waits:.0%}")
    if shared:
        yield _line("parallel", ", ".join(shared))
    if work.generates_first and (method := getattr(config, "method", None)):
        yield _line("method", method)
    split = f", split {','.join(f'{part:g}' for part in config.data.split)}"
    yield _line("data", f"{' '.join(config.data.path)}{split if config.reads_dialogues else ''}")
    length = f"{config.max_steps} steps" if config.max_steps else f"{config.epochs:g} epoch(s)"
    yield _line(
        "training",
        f"{length}, batch {config.batch_size} in micro-batches of {config.micro_batch_size}, length"
        f" {work.length}, seed {config.seed}",
    )


def _data(config: StepConfig, preview: Preview) -> Iterator[str]:
    """Rows, optimizer steps and tokens."""
    counts = preview.counts
    if counts is None:
        yield _line("rows", f"not known: {preview.unread}")
        return
    yield _line("rows", f"{counts.train:,} to train on, {counts.held_out:,} held out")
    yield from (_line("", note) for note in counts.notes if not note.startswith("step "))
    work, steps, tokens = config.workload(1), preview.steps(config), preview.tokens
    if steps is None:
        return
    epochs = steps * work.data_rows / counts.train
    kind = "iteration" if work.generates_first else "optimizer step"
    kind += "" if steps == 1 else "s"
    passes = f"{epochs:.2g}" if epochs < 10 else f"{epochs:,.0f}"
    passes += " pass" if passes == "1" else " passes"
    yield _line("steps", f"{steps:,} {kind} of {work.data_rows:,} rows: {passes} over the rows")
    if tokens is not None:
        total = tokens.row * work.data_rows * steps
        cut = f"; {tokens.cut:.0%} of the rows are too long" if tokens.cut else ""
        yield _line("tokens", f"{tokens.row:.0f} a row, {_count(total)} in all{cut}")


def _commands(plan: Plan) -> Iterator[str]:
    """What runs each step, with the settings that differ from the step's defaults."""
    yield "The same by hand, step by step"
    if Path.cwd() != ROOT:
        yield f"  export PYTHONPATH={shlex.quote(str(ROOT))}"
    for stage in plan.stages:
        if stage.name in plan.finished:
            continue
        config = plan.configs[stage.name]
        options = [
            word
            for name, words in as_options(config)
            if name.partition(".")[0] not in config.unused_roles
            for word in (f"--{name}", *words)
        ]
        module, *rest = step_words(stage.module, Path("FILE"))[1:]
        words = ["-m", module, *options, *rest[2:]]
        yield ""
        yield from _wrapped(launch_command(words, plan.where, plan.request))
        if plan.where.by == "ssh":
            for rank, host in enumerate(plan.where.hosts):
                yield f"  on {host.name}"
                command = node_command(words, plan.where, rank)
                slots = ",".join(str(slot) for slot in host.slots)
                shown = [] if host.is_whole else [f"CUDA_VISIBLE_DEVICES={slots}"]
                yield from _wrapped([*shown, *command])


def _wrapped(words: Sequence[str]) -> Iterator[str]:
    """A command in lines that a shell reads as one, an option with its words kept together."""
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


def _count(number: float) -> str:
    """`850`, `12.3 thousand`, `4.5 million`."""
    for unit, name in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f}"
