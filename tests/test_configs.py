"""Every preset and every script in the repository is usable and says no more than it must."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from pipeline.cli import parse_step
from pipeline.models.known import KNOWN
from pipeline.plan.request import parse_request
from pipeline.plan.resolve import step_configs
from pipeline.settings.plain import flatten, plain
from step0_pretrain.config import PretrainConfig
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo.config import PPOConfig
from step3_preference.config import PreferenceConfig
from train import STAGES

ROOT = Path(__file__).parent.parent
CLASSES = {
    "pretrain": PretrainConfig,
    "sft": SFTConfig,
    "reward": RewardConfig,
    "ppo": PPOConfig,
    "grpo": PPOConfig,
    "preference": PreferenceConfig,
}
MODULES = {f"{stage.module}": stage.config_class for stage in STAGES}
OWN = ("arithmetic-grpo", "embedded", "embedded-grpo", "guessing-grpo")
WHOLE = sorted((ROOT / "configs" / "parallel").glob("*.yaml"))
"""Files for train.py, of models that are trained in parts."""
PRESETS = sorted(p for section in CLASSES for p in (ROOT / "configs" / section).glob("*.yaml"))
SCRIPTS = sorted((ROOT / "scripts").glob("step*/*/*/run_*.sh"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_preset_lies_where_nobody_reads_it() -> None:
    assert sorted((ROOT / "configs").rglob("*.*")) == sorted(
        [*PRESETS, *WHOLE, *(ROOT / "configs" / f"{each}.yaml" for each in OWN)]
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


@pytest.mark.parametrize("preset", WHOLE, ids=name)
def test_a_model_in_parts_is_cut_as_its_preset_says(preset: Path) -> None:
    stated = yaml.safe_load(preset.read_text())
    command_line = parse_request(["--config", str(preset), "--step", "1"], STAGES)

    config = step_configs(command_line, STAGES, world=32)["step1_sft"]

    assert config.parallel.is_cut
    assert plain(config.parallel).items() >= stated["sft"]["parallel"].items()
    assert KNOWN[stated["actor_model"]]  # so that it can be planned without a download
    config.parallel.check(32)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose python prints its arguments, one a line."""
    directory = tmp_path_factory.mktemp("python")
    python = directory / "python"
    python.write_text('#!/bin/sh\nprintf \'%s\\n\' "$PYTHONPATH" "$@"\n')
    python.chmod(0o755)
    return {"PATH": os.environ["PATH"], "PYTHON": str(python), "HOME": str(directory)}


def printed(script: Path, *words: str, **environment: str) -> list[str]:
    return subprocess.run(
        ["bash", str(script), *words],
        env=environment,
        cwd=environment["HOME"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()


def index_of_step(words: list[str]) -> int:
    """Where the step's own command line begins, after any launcher's."""
    return len(words) - 1 - words[::-1].index("-m")


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_every_script_starts_its_step_with_its_preset(
    script: Path, environment: dict[str, str]
) -> None:
    step, _, deployment, file = script.relative_to(ROOT / "scripts").parts
    size, _, lora = file.removeprefix("run_").removesuffix(".sh").partition("_")
    of_step = {
        "step0_pretrain": ["CORPUS", "OUT", "1"],
        "step3_ppo": ["A", "C", "0", "1", "OUT"],
        "step3_grpo": ["A", "ROWS", "0", "OUT"],
        "step3_preference": ["A", "1", "OUT"],
    }
    arguments = of_step.get(step, ["OUT", "1"])

    words = printed(script, *arguments, "--seed", "7", HOSTFILE="hosts", **environment)

    at = index_of_step(words)
    config = parse_step(MODULES[words[at + 1]], words[at + 2 :])
    presets = [Path(words[n + 1]) for n, word in enumerate(words) if word == "--config"]
    assert words[0] == str(ROOT)
    assert words[at + 1] == ("step3_ppo" if step == "step3_grpo" else step) + ".train"
    assert (str(config.output_dir), config.seed) == ("OUT", 7)
    assert presets[0].stem.endswith(size)
    assert [preset.stem for preset in presets[1:]] == ["lora"] * bool(lora)
    assert words[1:at] == LAUNCHERS[deployment]
    if step == "step3_grpo":
        assert isinstance(config, PPOConfig)
        assert (config.method, config.actor.path, config.data.path) == ("grpo", "A", ("ROWS",))
        assert config.used_models().keys() == {"actor"}
        trained = [(config.actor, 0)]
    elif isinstance(config, PPOConfig):
        models = (config.actor, config.critic, config.reward)
        assert [model.path for model in models] == ["A", "C", "C"]
        trained = [(config.actor, 0), (config.critic, 1)]
    else:
        assert isinstance(config, PretrainConfig | SFTConfig | RewardConfig | PreferenceConfig)
        if isinstance(config, PretrainConfig):
            assert config.data.path == ("CORPUS",)
        if isinstance(config, PreferenceConfig):
            assert (config.method, config.model.path) == ("dpo", "A")
        trained = [(config.model, 1)]
    assert all((m.zero_stage, bool(m.lora)) == (stage, bool(lora)) for m, stage in trained)


LAUNCHERS = {
    "single_gpu": [],
    "single_node": ["-m", "pipeline.launch.torchrun", "--standalone", "--nproc-per-node", "gpu"],
    "multi_node": ["-m", "pipeline.launch.cluster", "--hostfile", "hosts"],
}


def test_a_script_takes_another_preference_method(environment: dict[str, str]) -> None:
    script = ROOT / "scripts" / "step3_preference" / "opt" / "single_gpu" / "run_1.3b.sh"

    words = printed(script, METHOD="simpo", **environment)

    config = parse_step(PreferenceConfig, words[index_of_step(words) + 2 :])
    assert (config.method, config.gamma, config.reference_free) == ("simpo", 1.375, True)
    assert (config.model.path, str(config.output_dir)) == ("output/step1_sft", "output/step3_simpo")


def test_every_model_has_its_presets_and_scripts() -> None:
    sizes = {
        "opt": "125m 350m 1.3b 6.7b 13b 30b 66b",
        "llama": "1b 7b 8b 13b 70b",
        "qwen": "0.5b 1.5b 3b 7b 14b 32b",
    }
    for family, each in sizes.items():
        for size in each.split():
            for step in ("step1_sft", "step3_ppo", "step3_preference"):
                assert list((ROOT / "scripts" / step / family).glob(f"*/run_{size}.sh"))
            for section in ("sft", "reward", "ppo", "preference"):
                assert list((ROOT / "configs" / section).glob(f"{family}*-{size}.yaml"))


def test_the_script_of_the_contract_is_there() -> None:
    assert ROOT / "scripts/step1_sft/opt/single_gpu/run_1.3b.sh" in SCRIPTS
