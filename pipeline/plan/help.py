"""The `--help` of train.py: what most runs need first, the rest by name."""

from collections.abc import Iterator, Sequence
from dataclasses import fields

from pipeline.cli.help import help_entry, names_help, settings_help, step_help
from pipeline.plan.request import Request
from pipeline.plan.stage import Stage
from pipeline.settings.fields import list_settings
from pipeline.system.errors import ConfigError, suggestion
from pipeline.system.installation import MODULE, TRAIN

COMMON = (
    *("step", "method", "actor_model", "reward_model", "data_path", "output_dir"),
    *("reward_function", "reward", "resume", "overwrite", "dry_run", "plan"),
    *("deployment_type", "num_processes"),
    *("lr", "batch_size", "epochs", "lora", "quantize", "max_length", "seed", "save_every"),
)
"""The options that the short help explains; it names the others."""

EXAMPLES = (
    TRAIN,
    f"{TRAIN} --actor-model facebook/opt-1.3b --reward-model facebook/opt-350m",
    f"{TRAIN} --actor-model DIR --data-path pairs.jsonl --output-dir out --dry-run",
    f"{TRAIN} --actor-model 6.7b --lora 16 --plan auto --plan-for 8xA100-40GB",
    f"{TRAIN} --step 3 --output-dir out --ppo.max_steps 200 --ppo.kl_coef 0.1",
    f"{TRAIN} --step 0 1 2 3 --actor-model DIR --pretrain.data.path c.tokens",
    f"{TRAIN} --method ppo grpo dpo --output-dir out",
    f"{TRAIN} --output-dir out --resume",
)


def train_help(stages: Sequence[Stage], words: Sequence[str] = ()) -> str:
    """The text of `--help`, followed by `words`: none, `all`, options or settings of steps.

    Raises:
        ConfigError: a word is none of these.
    """
    if words and words != ["all"]:
        return "\n\n".join("\n".join(_about(word, stages)) for word in words)
    sections = [stage.section for stage in stages]
    options = {each.name: each for each in list_settings(Request)}
    shown = list(options) if words else COMMON
    first = next((stage for stage in stages if stage.number > 0), stages[0])
    lines = [
        f"usage: {TRAIN} [OPTION ...] [--{{{','.join(sections)}}}.SETTING VALUE ...]",
        "",
        "From a base language model to a chat model in three steps. Without options it trains the",
        "embedded model of about 1M parameters on the embedded task, in minutes on any machine.",
        "",
        *settings_help([options[name] for name in shown], dashes=True),
        *help_entry(
            "--config FILE ...",
            "YAML files with these options and the steps' sections, as sft: or ppo:; later files"
            " win, and the command line wins over files.",
        ),
        *help_entry("--help [NAME ...]", "This; all options; or one option, section or setting."),
    ]
    if not words:
        others = [f"--{name.replace('_', '-')}" for name in options if name not in shown]
        lines += ["", "More options, by --help NAME", *names_help(others)]
    return "\n".join(
        [
            *lines,
            "",
            f"Settings of the steps, such as --ppo.kl_coef 0.05: --help {' '.join(sections)}, or",
            f"--help ppo.actor, --help kl_coef; also {MODULE} {first.module} --help, and so on",
            "",
            "Examples",
            *(f"  {example}" for example in EXAMPLES),
        ]
    )


def _about(word: str, stages: Sequence[Stage]) -> Iterator[str]:
    """Lines of `--help word`."""
    name = word.lstrip("-").replace("-", "_")
    section, _, rest = name.partition(".")
    named = [stage for stage in stages if stage.section == section]
    options = [each for each in list_settings(Request) if each.name == name]
    if options:
        yield from settings_help(options, dashes=True)
        return
    found = False
    for stage in named or stages:
        words = ([rest] if rest else []) if named else [name]
        try:
            yield step_help(stage.config_class, words, prefix=f"{stage.section}.")
            found = True
        except ConfigError:
            if named:
                raise
    if not found:
        known = [*(each.name for each in fields(Request)), *(each.section for each in stages)]
        hint = suggestion(name, known)
        raise ConfigError(f"--help {word}: there is no such option or setting; {hint}")
