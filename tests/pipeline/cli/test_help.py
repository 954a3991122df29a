import re
import subprocess
import sys

import pytest

from pipeline.cli.help import step_help
from pipeline.settings.fields import list_settings
from step3_ppo.config import PPOConfig
from step3_ppo.guard_settings import GuardSettings
from step3_ppo.reward_settings import RewardSettings
from tests.sources import ROOT


@pytest.mark.parametrize("command", ["-m step1_sft.train", "-m step3_ppo.train", "train.py"])
def test_help_imports_no_large_package(command: str) -> None:
    argv = [sys.executable, "-X", "importtime", *command.split(), "--help"]
    result = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)

    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert result.stdout.startswith("usage: python ")
    assert "pipeline.settings" in imported
    assert not {"torch", "transformers", "numpy", "datasets"} & imported


def test_step_help_lists_own_settings_then_common_ones_then_sections() -> None:
    lines = step_help(PPOConfig).splitlines()
    first, second, third = (
        next(number for number, line in enumerate(lines) if line.startswith(title))
        for title in ("Settings of this step", "Settings of every step", "Sections")
    )

    def options(start: int, end: int) -> list[str]:
        return re.findall(r"^  --([\w.]+)", "\n".join(lines[start:end]), re.MULTILINE)

    declared = vars(PPOConfig) | vars(RewardSettings) | vars(GuardSettings)
    names = [field.name for field in list_settings(PPOConfig) if field.name in declared]
    assert len(lines) < 220
    assert options(first, second)[0] == "method"
    assert set(options(first, second)) <= set(names)
    assert {"kl_coef", "ema_decay", "rewards"} <= set(options(first, second))
    assert options(second, third)[:3] == ["output_dir", "seed", "max_steps"]
    roles = ("actor", "critic", "reference", "teacher", "reward", "base")
    assert options(third, len(lines)) == [
        f"{section}.SETTING" for section in ("gold", "data", "parallel", *roles)
    ]
