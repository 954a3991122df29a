import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.help import step_help
from pipeline.plan.help import train_help
from pipeline.plan.request import Request
from pipeline.settings.describe import list_settings
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo.config import PPOConfig
from step3_ppo.guard_settings import GuardSettings
from step3_ppo.reward_settings import RewardSettings
from step3_ppo.settings import PPOSettings
from train import STAGES

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("command", ["-m step1_sft.train", "-m step3_ppo.train", "train.py"])
def test_help_starts_at_once_and_without_pytorch(command: str) -> None:
    argv = [sys.executable, "-X", "importtime", *command.split(), "--help"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)

    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert ended.stdout.startswith("usage: python ")
    assert "pipeline.settings" in imported
    assert not {"torch", "transformers", "numpy", "datasets"} & imported
    # Processor time: the machine may be busy with something else.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_a_step_run_on_several_processes_prints_its_help_once() -> None:
    argv = [sys.executable, "-m", "step1_sft.train", "--help"]
    environment = {**os.environ, "RANK": "1"}
    ended = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, check=True)

    assert (ended.stdout, ended.stderr) == (b"", b"")


def test_a_step_shows_its_own_settings_first_then_those_of_all_steps_then_sections() -> None:
    lines = step_help(PPOConfig).splitlines()
    first, second, third = (
        next(number for number, line in enumerate(lines) if line.startswith(title))
        for title in ("Settings of this step", "Settings of every step", "Sections")
    )

    def options(start: int, end: int) -> list[str]:
        return re.findall(r"^  --([\w.]+)", "\n".join(lines[start:end]), re.MULTILINE)

    declared = vars(PPOSettings) | vars(RewardSettings) | vars(GuardSettings)
    own = [each.name for each in list_settings(PPOConfig) if each.name in declared]
    assert len(lines) < 210
    assert options(first, second)[0] == "method"
    assert set(options(first, second)) <= set(own)
    assert {"kl_coef", "ema_decay", "rewards"} <= set(options(first, second))
    assert options(second, third)[:3] == ["output_dir", "seed", "max_steps"]
    roles = ("actor", "critic", "reference", "reward", "base")
    assert options(third, len(lines)) == [
        f"{each}.SETTING" for each in ("gold", "data", "parallel", *roles)
    ]


def test_a_section_of_the_short_help_names_what_it_has() -> None:
    text = " ".join(step_help(SFTConfig).split())

    assert "--model.SETTING A model that learns: where it starts and how it is trained." in text
    assert "gradient_checkpointing checkpoint_every lora.* head_lr fp16.* optim.* kernels" in text


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("actor.lora", ["rank", "alpha", "variant", "dropout", "targets", "lr"]),
        ("--actor.lora.", ["rank", "alpha", "variant", "dropout", "targets", "lr"]),
    ],
)
def test_help_of_a_section_has_its_settings_alone(word: str, names: list[str]) -> None:
    said = re.findall(r"^  --([\w.]+)", step_help(PPOConfig, [word]), re.MULTILINE)

    assert said == ["actor.lora", *(f"actor.lora.{name}" for name in names)]


def test_help_of_a_name_finds_it_anywhere() -> None:
    said = re.findall(r"^  --([\w.]+)", step_help(PPOConfig, ["head-lr"]), re.MULTILINE)

    assert said == ["actor.head_lr", "critic.head_lr"]
    with pytest.raises(ConfigError, match=r"^--help kl_coeff: .*did you mean kl_coef\?$"):
        step_help(PPOConfig, ["kl_coeff"])


def test_a_default_of_0_is_shown() -> None:
    assert "Weight of the entropy bonus. (default: 0)" in step_help(PPOConfig, ["entropy_coef"])


def test_the_lengths_say_what_each_step_loses() -> None:
    for config_class in (SFTConfig, RewardConfig):
        said = " ".join(step_help(config_class, ["data.max_length"]).split())
        assert "loses its end in step 1, and its beginning in step 2" in said


def test_train_names_every_option_and_explains_every_one_on_request() -> None:
    short, whole = train_help(STAGES), train_help(STAGES, ["all"])
    options = [f"--{setting.name.replace('_', '-')}" for setting in list_settings(Request)]

    assert len(short.splitlines()) < 125
    assert all(re.search(rf"{option}\b", short) for option in options)
    assert all(re.search(rf"^  {option}\b", whole, re.MULTILINE) for option in options)
    assert max(len(line) for line in (short + "\n" + whole).splitlines()) <= 100


@pytest.mark.parametrize(
    ("word", "begins"),
    [
        ("autotune", "Autotuning\n  --autotune {tune,run}"),
        ("machines", "Several machines, and parts of one\n  --hostfile PATH"),
        ("--max-length", "  --max-length N            Prompt + response"),
        ("ppo", "usage: python train.py ... [--ppo.SETTING VALUE ...]"),
        ("ppo.actor.lora.rank", "  --ppo.actor.lora.rank N"),
        ("kl_coef", "  --ppo.kl_coef NUMBER"),
    ],
)
def test_train_explains_a_group_an_option_or_a_setting(word: str, begins: str) -> None:
    assert train_help(STAGES, [word]).startswith(begins)


def test_train_says_what_else_there_is_where_it_knows_no_such_name() -> None:
    with pytest.raises(ConfigError, match=r"^--help zzzz: there is no .*takes all, run, training"):
        train_help(STAGES, ["zzzz"])
    with pytest.raises(ConfigError, match=r"did you mean seed\?$"):
        train_help(STAGES, ["sed"])
