"""The `--help` of train.py: what most runs need first, then the names of the rest."""

from collections.abc import Sequence

from pipeline.cli.help import help_entry, names_help, settings_help
from pipeline.plan.request import Request
from pipeline.plan.stage import Stage
from pipeline.settings.fields import list_settings
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


def train_help(stages: Sequence[Stage], *, full: bool = False) -> str:
    """The text of `--help`; `full` describes all options, else those that most runs need."""
    sections = [stage.section for stage in stages]
    options = {each.name: each for each in list_settings(Request)}
    shown = list(options) if full else COMMON
    modules = dict.fromkeys(stage.module for stage in stages)
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
        *help_entry("--help [all]", "This; all: every option."),
    ]
    if not full:
        others = [f"--{name.replace('_', '-')}" for name in options if name not in shown]
        lines += ["", "More options, described by --help all", *names_help(others)]
    return "\n".join(
        [
            *lines,
            "",
            "Settings of the steps, such as --ppo.kl_coef 0.05, are described by",
            *(f"  {MODULE} {module} --help" for module in modules),
            "",
            "Examples",
            *(f"  {example}" for example in EXAMPLES),
        ]
    )
