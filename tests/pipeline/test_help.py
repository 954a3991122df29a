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


def test_help_of_a_name_finds_it_anywhere() -> None:
    said = re.findall(r"^  --([\w.]+)", step_help(PPOConfig, ["head-lr"]), re.MULTILINE)

    assert said == ["actor.head_lr", "critic.head_lr"]
    with pytest.raises(ConfigError, match=r"^--help kl_coeff: .*did you mean kl_coef\?$"):
        step_help(PPOConfig, ["kl_coeff"])


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
        ("--max-length", "  --max-length N            Prompt + response"),
        ("ppo", "usage: python train.py ... [--ppo.SETTING VALUE ...]"),
        ("ppo.actor.lora.rank", "  --ppo.actor.lora.rank N"),
        ("kl_coef", "  --ppo.kl_coef NUMBER"),
    ],
)
def test_train_explains_an_option_or_a_setting(word: str, begins: str) -> None:
    assert train_help(STAGES, [word]).startswith(begins)


def test_train_says_what_else_there_is_where_it_knows_no_such_name() -> None:
    with pytest.raises(ConfigError, match=r"^--help zzzz: there is no .*--help all lists"):
        train_help(STAGES, ["zzzz"])
    with pytest.raises(ConfigError, match=r"did you mean seed\?$"):
        train_help(STAGES, ["sed"])
