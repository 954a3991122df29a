"""Every preset and every script of the repository is usable."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.cli.options import parse_step
from pipeline.models.hf.known import KNOWN
from pipeline.plan.request import parse_request
from pipeline.plan.resolve import step_configs
from pipeline.settings.fields import flatten, plain
from step3_ppo.config import PPOConfig
from train import STAGES

ROOT = Path(__file__).parent.parent
CLASSES: dict[str, Any] = {stage.config_class.section: stage.config_class for stage in STAGES}
MODULES: dict[str, Any] = {stage.module: stage.config_class for stage in STAGES}
FOR_TRAIN = ("arithmetic-grpo", "embedded", "embedded-grpo")
WHOLE = sorted((ROOT / "configs" / "parallel").glob("*.yaml"))
PRESETS = sorted(p for p in (ROOT / "configs").glob("*.yaml") if p.stem not in FOR_TRAIN)
SCRIPTS = sorted((ROOT / "scripts").glob("step*/*/*/run_*.sh"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("preset", PRESETS, ids=name)
def test_every_section_of_a_preset_parses_and_states_only_what_differs(preset: Path) -> None:
    for section, settings in yaml.safe_load(preset.read_text()).items():
        defaults = flatten(plain(CLASSES[section]()))

        config = parse_step(CLASSES[section], ["--config", str(preset)])

        found = flatten(plain(config))
        for setting, value in flatten(settings).items():
            assert defaults.get(setting) != value, (section, setting)
            assert setting in ("rewards", "data") or found[setting] == value


@pytest.mark.parametrize("preset", WHOLE, ids=name)
def test_a_model_in_parts_is_cut_as_its_preset_says(preset: Path) -> None:
    stated = yaml.safe_load(preset.read_text())
    command_line = parse_request(["--config", str(preset), "--step", "1"], STAGES)

    config = step_configs(command_line, STAGES, world=32)["step1_sft"]

    assert config.parallel.pp * config.parallel.tp > 1
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


def started(script: str | Path, *words: str, **environment: str) -> tuple[list[str], str, Any]:
    """The words of the launcher, the module, and the settings of its command line."""
    command = ["bash", str(ROOT / "scripts" / script), *words]
    done = subprocess.run(
        command,
        env=environment,
        cwd=environment["HOME"],
        capture_output=True,
        text=True,
        check=True,
    )
    root, *printed = done.stdout.splitlines()
    assert root == str(ROOT)
    at = len(printed) - 1 - printed[::-1].index("-m")
    module = printed[at + 1]
    return printed[:at], module, parse_step(MODULES[module], printed[at + 2 :])


LAUNCHERS = {
    "single_gpu": [],
    "single_node": ["-m", "pipeline.launch.torchrun", "--standalone", "--nproc-per-node", "gpu"],
    "multi_node": ["-m", "pipeline.launch.cluster", "--hostfile", "hosts"],
}


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_every_script_starts_its_step_with_its_preset(
    script: Path, environment: dict[str, str]
) -> None:
    step, family, deployment, file = script.relative_to(ROOT / "scripts").parts
    size, _, lora = file.removeprefix("run_").removesuffix(".sh").partition("_")
    arguments = ["A", "C", "0", "1", "OUT"] if step == "step3_ppo" else ["OUT", "1"]

    launcher, module, config = started(
        script, *arguments, "--seed", "7", HOSTFILE="hosts", **environment
    )

    assert (launcher, module) == (LAUNCHERS[deployment], f"{step}.train")
    assert (str(config.output_dir), config.seed) == ("OUT", 7)
    if step == "step3_ppo":
        models = (config.actor, config.critic, config.reward)
        assert [model.path for model in models] == ["A", "C", "C"]
        trained = [(config.actor, 0), (config.critic, 1)]
    else:
        assert family == "other_language" or size in config.model.path.lower()
        trained = [(config.model, 1)]
    assert all((m.zero_stage, bool(m.lora)) == (stage, bool(lora)) for m, stage in trained)


def test_the_script_of_every_step_takes_a_model_and_a_deployment(
    environment: dict[str, str],
) -> None:
    def run(*words: str, **more: str) -> Any:
        return started("run.sh", *words, **environment, **more)[2]

    pretrain = run("step0_pretrain", "opt-125m_lora", "single_gpu", "OUT", CORPUS="c.tokens")
    assert (pretrain.data.path, pretrain.model.lora.rank) == (("c.tokens",), 256)
    reward = run("step2_reward", "qwen2.5-0.5b", "single_node", "out/two")
    assert reward.model.zero_stage == 0
    ppo = run("step3_ppo", "llama-3.1-70b", "multi_node", LAUNCH="--num-nodes 1")
    assert (ppo.actor.zero_stage, ppo.critic.zero_stage) == (3, 3)
    assert (ppo.actor.path, ppo.reward.path) == ("output/step1_sft", "output/step2_reward")
    grpo = run("step3_grpo", "qwen2.5-7b_lora", "single_gpu", "OUT", "1", ACTOR="A")
    assert (grpo.method, grpo.actor.path, grpo.actor.zero_stage) == ("grpo", "A", 1)
    assert isinstance(grpo, PPOConfig)
    assert grpo.used_models().keys() == {"actor"}
    simpo = run("step3_preference", "opt-1.3b", "single_gpu", METHOD="simpo")
    assert (simpo.method, simpo.gamma, simpo.reference_free) == ("simpo", 1.375, True)
    assert (simpo.model.path, str(simpo.output_dir)) == ("output/step1_sft", "output/step3_simpo")


def test_a_sweep_tries_every_combination_once_and_again_those_that_fail(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\necho "$@" >>"$CALLS"\ncase "$*" in *"zero_stage 1"*) exit 1;; esac\n'
    )
    python.chmod(0o755)
    words = ["step1_sft", "opt-1.3b", "single_gpu", str(tmp_path / "out"), "--max_steps", "2"]
    calls = tmp_path / "calls"
    narrow = {"CALLS": str(calls), "STAGES": "0 1", "OFFLOAD": "cpu", "LORA": "off 64"}

    for _ in range(2):
        subprocess.run(
            ["bash", str(ROOT / "scripts" / "sweep.sh"), *words],
            env=os.environ | narrow | {"PYTHON": str(python)},
            check=True,
        )

    rows = [line.split("\t") for line in (tmp_path / "out" / "sweep.tsv").read_text().splitlines()]
    assert [row[:4] for row in rows[1:5]] == [
        ["0", "cpu", "off", "0"],
        ["0", "cpu", "64", "0"],
        ["1", "cpu", "off", "1"],
        ["1", "cpu", "64", "1"],
    ]
    called = calls.read_text().splitlines()
    assert len(called) == 6  # the failed ones are tried again
    assert "--model.zero.offload.optimizer cpu --model.lora.rank 64 --max_steps 2" in called[1]
