"""Every preset and every script in the repository is usable and says no more than it must."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from pipeline.cli import parse_step
from pipeline.settings import flatten, plain
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo.config import PPOConfig
from train import STAGES

ROOT = Path(__file__).parent.parent
CLASSES = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig}
MODULES = {f"{stage.module}": stage.config_class for stage in STAGES}
PRESETS = sorted(p for section in CLASSES for p in (ROOT / "configs" / section).glob("*.yaml"))
SCRIPTS = sorted((ROOT / "scripts").glob("step*/*/*/run_*.sh"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_preset_lies_where_nobody_reads_it() -> None:
    assert sorted((ROOT / "configs").rglob("*.*")) == sorted(
        [*PRESETS, ROOT / "configs" / "embedded.yaml"]
    )


@pytest.mark.parametrize("preset", PRESETS, ids=name)
def test_every_preset_parses_and_states_only_what_differs(preset: Path) -> None:
    config_class = CLASSES[preset.parent.name]
    text = preset.read_text()
    stated = flatten(yaml.safe_load(text))
    defaults = flatten(plain(config_class()))

    parse_step(config_class, ["--config", str(preset)])

    assert text.startswith("# ")
    assert len(text.splitlines()) <= 20
    assert not {each for each, value in stated.items() if defaults.get(each) == value}


@pytest.fixture
def launchers(tmp_path: Path) -> dict[str, str]:
    """An environment whose python and torchrun print their arguments, one a line."""
    for program in ("python", "torchrun"):
        (tmp_path / program).write_text('#!/bin/sh\nprintf \'%s\\n\' "$PYTHONPATH" "$@"\n')
        (tmp_path / program).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    return {"PATH": path, "PYTHON": str(tmp_path / "python"), "HOME": str(tmp_path)}


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_every_script_starts_its_step_with_its_preset(
    script: Path, launchers: dict[str, str], tmp_path: Path
) -> None:
    step, _, deployment, size = script.relative_to(ROOT / "scripts").parts
    arguments = ["A", "C", "0", "0", "OUT"] if step == "step3_ppo" else ["OUT", "0"]

    printed = subprocess.run(
        ["bash", str(script), *arguments, "--seed", "7"],
        env=launchers,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()

    module = printed.index("-m")
    config = parse_step(MODULES[printed[module + 1]], printed[module + 2 :])
    preset = Path(printed[printed.index("--config") + 1])
    assert printed[0] == str(ROOT)
    assert printed[module + 1] == f"{step}.train"
    assert (str(config.output_dir), config.seed) == ("OUT", 7)
    assert preset.stem.endswith(size.removeprefix("run_").removesuffix(".sh"))
    assert ("--standalone" in printed) == (deployment == "single_node")
    if isinstance(config, PPOConfig):
        models = (config.actor, config.critic, config.reward)
        assert [model.path for model in models] == ["A", "C", "C"]


def test_the_script_of_the_contract_is_there() -> None:
    assert ROOT / "scripts/step1_sft/opt/single_gpu/run_1.3b.sh" in SCRIPTS
