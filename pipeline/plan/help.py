"""The `--help` of train.py: what most runs need first, the rest by name."""

import difflib
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from pipeline.errors import ConfigError
from pipeline.help import INDENT, WIDTH, help_entry, settings_help, step_help
from pipeline.installation import MODULE, TRAIN
from pipeline.launch.deployment import Deployment
from pipeline.plan.request import Request
from pipeline.plan.stage import METHODS, Stage
from pipeline.plan.tuning_options import Autotuning
from pipeline.settings.build import rows_of
from pipeline.settings.describe import Setting, list_settings


@dataclass(frozen=True)
class Group:
    """Options that belong together."""

    key: str
    """What `--help` takes to list them."""

    title: str
    names: tuple[str, ...]
    brief: bool = False
    """Whether the short help has their names alone."""


def _names(config_class: type) -> tuple[str, ...]:
    return tuple(each.name for each in fields(config_class))


EVERYDAY = ("deployment_type", "num_processes", "num_gpus")
"""Of the options that say where processes run, those of one machine."""

GROUPS = (
    Group(
        "run",
        "What runs",
        (
            *("step", "method", "reward_function", "reward"),
            *("actor_model", "reward_model", "data_path", "output_dir", "resume", "overwrite"),
        ),
    ),
    Group(
        "training",
        "Training, in every step that runs; the steps' own settings win",
        (
            *("lr", "batch_size", "epochs", "lora", "lora_variant", "quantize"),
            *("max_length", "seed", "save_every"),
        ),
    ),
    Group("plan", "Before it runs", ("dry_run", "plan", "plan_for", "check")),
    Group("deployment", "Where it runs", EVERYDAY),
    Group("rl", "RL in step 3", ("environment", "guards"), brief=True),
    Group(
        "data",
        "Data",
        ("eval_path", "data_split", "data_seed", "fields", "format"),
        brief=True,
    ),
    Group(
        "zero",
        "ZeRO and DeepSpeed files",
        (
            *("actor_zero_stage", "reward_zero_stage"),
            *("replicas", "tensor_parallel", "pipeline_parallel", "zero_config"),
        ),
        brief=True,
    ),
    Group(
        "machines",
        "Several machines, and parts of one",
        tuple(name for name in _names(Deployment) if name not in EVERYDAY),
        brief=True,
    ),
    Group("autotune", "Autotuning", _names(Autotuning), brief=True),
)

EXAMPLES = (
    TRAIN,
    f"{TRAIN} --actor-model facebook/opt-1.3b --reward-model facebook/opt-350m",
    f"{TRAIN} --actor-model 1.3b --reward-model 350m --lora 16 --lr 1e-4",
    f"{TRAIN} --actor-model DIR --data-path pairs.jsonl --output-dir out --dry-run",
    f"{TRAIN} --actor-model 6.7b --plan auto --plan-for 8xA100-40GB",
    f"{TRAIN} --step 3 --output-dir out --ppo.max_steps 200 --ppo.kl_coef 0.1",
    f"{TRAIN} --step 0 1 2 3 --actor-model DIR --pretrain.data.path c.tokens",
    f"{TRAIN} --method dpo",
    f"{TRAIN} --method ppo grpo rloo --output-dir out",
    f"{TRAIN} --deployment-type single_node --autotune run",
    f"{TRAIN} --output-dir out --resume",
)


def train_help(stages: Sequence[Stage], words: Sequence[str] = ()) -> str:
    """The text of `--help`, followed by `words`: none, `all`, groups, options or steps' settings.

    Raises:
        ConfigError: a word is none of these.
    """
    if words and words != ["all"]:
        return "\n\n".join("\n".join(_about(word, stages)) for word in words)
    sections = [stage.section for stage in stages]
    first = next((stage for stage in stages if stage.number > 0), stages[0])
    lines = [
        f"usage: {TRAIN} [OPTION ...] [--{{{','.join(sections)}}}.SETTING VALUE ...]",
        "",
        "From a base language model to a chat model in three steps. Without options it trains the",
        "embedded model of about 1M parameters on the embedded task, in minutes on any machine.",
    ]
    groups = _groups()
    for group in groups:
        if words or not group.brief:
            lines += ["", group.title, *_listed(group)]
    if not words:
        lines += ["", "More options, by --help NAME; --help all lists every one"]
        lines += [line for group in groups if group.brief for line in _named(group)]
    lines += [
        "",
        f"Settings of the steps, such as --ppo.kl_coef 0.05: --help {' '.join(sections)}, or",
        f"--help ppo.actor, --help kl_coef; also {MODULE} {first.module} --help, and so on",
        "",
        "Examples",
        *(f"  {example}" for example in EXAMPLES),
    ]
    return "\n".join(lines)


def _groups() -> tuple[Group, ...]:
    """All groups; an option that none has is in the first."""
    grouped = {name for group in GROUPS for name in group.names}
    others = tuple(name for name in _names(Request) if name not in grouped)
    first, *rest = GROUPS
    return Group(first.key, first.title, (*first.names, *others)), *rest


def _listed(group: Group) -> Iterator[str]:
    """The options of a group with their meanings."""
    settings = {each.name: each for each in list_settings(Request)}
    yield from settings_help([settings[name] for name in group.names], dashes=True)
    if group.key == GROUPS[0].key:
        yield from help_entry(
            "--config FILE ...",
            "YAML files with these options and the steps' sections, as sft: or ppo:; later files"
            " win, and the command line wins over files.",
        )
        yield from help_entry("--help [NAME ...]", "This; all; or a name listed below.")


def _named(group: Group) -> list[str]:
    """The names of a group's options."""
    names = " ".join("--" + name.replace("_", "-") for name in group.names)
    room = " " * INDENT
    lines = textwrap.wrap(
        names, WIDTH, initial_indent=room, subsequent_indent=room, break_on_hyphens=False
    )
    return [f"  --help {group.key}".ljust(INDENT) + group.title, *lines]


def _about(word: str, stages: Sequence[Stage]) -> Iterator[str]:
    """What `--help word` lists."""
    name = word.lstrip("-").replace("-", "_")
    group = next((each for each in _groups() if each.key == name), None)
    section, _, rest = name.partition(".")
    stage = next((each for each in stages if each.section == section), None)
    if section == METHODS and rest:
        method, _, rest = rest.partition(".")
        section = f"{METHODS}.{method}"
        stage = next((each for each in stages if method in rows_of(each.config_class)), None)
    options: list[Setting] = [each for each in list_settings(Request) if each.name == name]
    if stage is not None:
        yield step_help(stage.config_class, [rest] if rest else [], prefix=f"{section}.")
    elif group is not None:
        yield from [group.title, *_listed(group)]
    elif options:
        yield from settings_help(options, dashes=True)
    else:
        found = [text for each in stages if (text := _in_step(each, name))]
        if not found:
            keys = [*(each.key for each in GROUPS), *(each.section for each in stages)]
            close = difflib.get_close_matches(name, [*_names(Request), *keys], n=1)
            hint = f"did you mean {close[0]}?" if close else f"--help takes all, {', '.join(keys)}"
            raise ConfigError(f"--help {word}: there is no such option or setting; {hint}")
        yield from found


def _in_step(stage: Stage, name: str) -> str:
    """The settings of that name in a step; nothing where it has none."""
    try:
        return step_help(stage.config_class, [name], prefix=f"{stage.section}.")
    except ConfigError:
        return ""
