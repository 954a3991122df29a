"""From a base language model to a chat model: supervised fine-tuning, reward model, PPO or DPO.

`python train.py` runs the three steps on the embedded default; `--step 0` continues pre-training
before them; `--help` lists the options.
"""

from pipeline.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from collections.abc import Sequence

from pipeline.cli.help import help_entry, names_help, settings_help
from pipeline.cli.options import print_output, run_main, split_options
from pipeline.plan.request import Request
from pipeline.plan.stage import INITIAL, Stage
from pipeline.run import orchestrator
from pipeline.settings.fields import list_settings
from pipeline.system.installation import MODULE, TRAIN
from step0_pretrain.config import PretrainConfig
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo.config import PPOConfig
from step3_preference.config import PreferenceConfig

STAGES = (
    Stage(
        0,
        "step0_pretrain",
        "pretrain",
        PretrainConfig,
        "step0_pretrain.train",
        models={"model": INITIAL},
        options={"model": "actor"},
        on_request=True,
    ),
    Stage(
        1,
        "step1_sft",
        "sft",
        SFTConfig,
        "step1_sft.train",
        models={"model": "pretrain"},
        options={"model": "actor"},
    ),
    Stage(
        2,
        "step2_reward",
        "reward",
        RewardConfig,
        "step2_reward.train",
        models={"model": "sft"},
        options={"model": "reward"},
    ),
    Stage(
        3,
        "step3_ppo",
        "ppo",
        PPOConfig,
        "step3_ppo.train",
        models={"actor": "sft", "critic": "reward", "reward": "reward", "base": INITIAL},
        options={"actor": "actor", "critic": "reward", "reward": "reward"},
        fallbacks={"critic": "sft"},
    ),
    Stage(
        3,
        "step3_dpo",
        "preference",
        PreferenceConfig,
        "step3_preference.train",
        models={"model": "sft", "reward": "reward", "base": INITIAL},
        options={"model": "actor"},
        method_origins={"orpo": {"model": INITIAL}},
        optional=frozenset({"reward"}),
        uses_skipped_rows=True,
        separate_directories=True,
    ),
)


COMMON = (
    *("step", "method", "actor_model", "reward_model", "data_path", "output_dir"),
    *("reward_function", "reward", "teacher", "resume", "overwrite", "dry_run", "plan"),
    *("deployment_type", "num_processes"),
    *("lr", "batch_size", "epochs", "lora", "quantize", "max_length", "seed", "save_every"),
)
"""The options that the short help explains; it lists the others by name."""

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


def train_help(*, full: bool = False) -> str:
    """Return the text of `--help`: the options that most runs need, or all options if `full`."""
    sections = [stage.section for stage in STAGES]
    options = {option.name: option for option in list_settings(Request)}
    names = list(options) if full else COMMON
    modules = dict.fromkeys(stage.module for stage in STAGES)
    lines = [
        f"usage: {TRAIN} [OPTION ...] [--{{{','.join(sections)}}}.SETTING VALUE ...]",
        "",
        "Train a base language model into a chat model in three steps. Without options, train the",
        "embedded model of about 1M parameters on the embedded task, in minutes on any machine.",
        "",
        *settings_help([options[name] for name in names], dashes=True),
        *help_entry(
            "--config FILE ...",
            "YAML files with these options and the steps' sections, such as sft: or ppo:; later"
            " files win, and the command line wins over files.",
        ),
        *help_entry("--help [all]", "Print this help; `all` describes every option."),
    ]
    if not full:
        others = [f"--{name.replace('_', '-')}" for name in options if name not in names]
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


def main(argv: Sequence[str]) -> None:
    """Print the help, or pass the command line and the steps to the orchestrator."""
    for name, values in split_options(argv):
        if name == "help":
            print_output(train_help(full=values == ["all"]))
            return
    orchestrator.main(argv, STAGES)


if __name__ == "__main__":
    run_main(main)
