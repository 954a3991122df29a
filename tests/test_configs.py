"""Every preset and every script of the repository is usable."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.cli.options import parse_step
from pipeline.models.hf.known import KNOWN_CONFIGS
from pipeline.plan.request import parse_request
from pipeline.plan.resolve import step_configs
from pipeline.settings.fields import flatten, to_plain
from step3_ppo.config import PPOConfig
from train import STAGES

ROOT = Path(__file__).parent.parent
SECTIONS: dict[str, Any] = {stage.config_class.section: stage.config_class for stage in STAGES}
MODULES: dict[str, Any] = {stage.module: stage.config_class for stage in STAGES}
TRAIN_PRESETS = ("arithmetic-grpo", "embedded", "embedded-grpo")
PARALLEL_PRESETS = sorted((ROOT / "configs" / "parallel").glob("*.yaml"))
PRESETS = sorted(p for p in (ROOT / "configs").glob("*.yaml") if p.stem not in TRAIN_PRESETS)
SCRIPTS = sorted((ROOT / "scripts").glob("step*/*/*/run_*.sh"))


def relative_path(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("preset", PRESETS, ids=relative_path)
def test_presets_parse_and_state_only_non_default_values(preset: Path) -> None:
    for section, settings in yaml.safe_load(preset.read_text()).items():
        defaults = flatten(to_plain(SECTIONS[section]()))

        config = parse_step(SECTIONS[section], ["--config", str(preset)])

        actual = flatten(to_plain(config))
        for setting, value in flatten(settings).items():
            assert defaults.get(setting) != value, (section, setting)
            assert setting in ("rewards", "data") or actual[setting] == value


@pytest.mark.parametrize("preset", PARALLEL_PRESETS, ids=relative_path)
def test_parallel_presets_set_the_pipeline_and_tensor_parallel_sizes(preset: Path) -> None:
    expected = yaml.safe_load(preset.read_text())
    request = parse_request(["--config", str(preset), "--step", "1"], STAGES)

    config = step_configs(request, STAGES, world=32)["step1_sft"]

    assert config.parallel.pp * config.parallel.tp > 1
    assert to_plain(config.parallel).items() >= expected["sft"]["parallel"].items()
    assert KNOWN_CONFIGS[expected["actor_model"]]  # so that it can be planned without a download
    config.parallel.check(32)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables in which `python` prints its arguments, one per line."""
    directory = tmp_path_factory.mktemp("python")
    python = directory / "python"
    python.write_text('#!/bin/sh\nprintf \'%s\\n\' "$PYTHONPATH" "$@"\n')
    python.chmod(0o755)
    return {"PATH": os.environ["PATH"], "PYTHON": str(python), "HOME": str(directory)}


def run_script(script: str | Path, *args: str, **environment: str) -> tuple[list[str], str, Any]:
    """Run a script; return the launcher's arguments, the module and its parsed settings."""
    command = ["bash", str(ROOT / "scripts" / script), *args]
    process = subprocess.run(
        command,
        env=environment,
        cwd=environment["HOME"],
        capture_output=True,
        text=True,
        check=True,
    )
    root, *printed = process.stdout.splitlines()
    assert root == str(ROOT)
    index = len(printed) - 1 - printed[::-1].index("-m")
    module = printed[index + 1]
    return printed[:index], module, parse_step(MODULES[module], printed[index + 2 :])


LAUNCHERS = {
    "single_gpu": [],
    "single_node": ["-m", "pipeline.launch.torchrun", "--standalone", "--nproc-per-node", "gpu"],
    "multi_node": ["-m", "pipeline.launch.cluster", "--hostfile", "hosts"],
}


@pytest.mark.parametrize("script", SCRIPTS, ids=relative_path)
def test_scripts_start_their_step_with_their_preset(
    script: Path, environment: dict[str, str]
) -> None:
    step, family, deployment, file = script.relative_to(ROOT / "scripts").parts
    size, _, lora = file.removeprefix("run_").removesuffix(".sh").partition("_")
    arguments = ["A", "C", "0", "1", "OUT"] if step == "step3_ppo" else ["OUT", "1"]

    launcher, module, config = run_script(
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


def test_run_script_accepts_step_model_and_deployment(environment: dict[str, str]) -> None:
    def run(*args: str, **variables: str) -> Any:
        return run_script("run.sh", *args, **environment, **variables)[2]

    pretrain = run("step0_pretrain", "opt-125m_lora", "single_gpu", "OUT", CORPUS="c.tokens")
    assert (pretrain.data.path, pretrain.model.lora.rank) == (("c.tokens",), 256)
    reward = run("step2_reward", "qwen3-0.6b", "single_node", "out/two")
    assert reward.model.zero_stage == 0
    ppo = run("step3_ppo", "llama-3.1-70b", "multi_node", LAUNCH="--num-nodes 1")
    assert (ppo.actor.zero_stage, ppo.critic.zero_stage) == (3, 3)
    assert (ppo.actor.path, ppo.reward.path) == ("output/step1_sft", "output/step2_reward")
    grpo = run("step3_grpo", "qwen3-8b_lora", "single_gpu", "OUT", "1", ACTOR="A")
    assert (grpo.method, grpo.actor.path, grpo.actor.zero_stage) == ("grpo", "A", 1)
    assert isinstance(grpo, PPOConfig)
    assert grpo.used_models().keys() == {"actor"}
    simpo = run("step3_preference", "opt-1.3b", "single_gpu", METHOD="simpo")
    assert (simpo.method, simpo.gamma, simpo.reference_free) == ("simpo", 1.375, True)
    assert (simpo.model.path, str(simpo.output_dir)) == ("output/step1_sft", "output/step3_simpo")


def test_sweep_runs_each_combination_once_and_retries_failures(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\necho "$@" >>"$CALLS"\ncase "$*" in *"zero_stage 1"*) exit 1;; esac\n'
    )
    python.chmod(0o755)
    args = ["step1_sft", "opt-1.3b", "single_gpu", str(tmp_path / "out"), "--max_steps", "2"]
    calls = tmp_path / "calls"
    variables = {"CALLS": str(calls), "STAGES": "0 1", "OFFLOAD": "cpu", "LORA": "off 64"}

    for _ in range(2):
        subprocess.run(
            ["bash", str(ROOT / "scripts" / "sweep.sh"), *args],
            env=os.environ | variables | {"PYTHON": str(python)},
            check=True,
        )

    rows = [line.split("\t") for line in (tmp_path / "out" / "sweep.tsv").read_text().splitlines()]
    assert [row[:4] for row in rows[1:5]] == [
        ["0", "cpu", "off", "0"],
        ["0", "cpu", "64", "0"],
        ["1", "cpu", "off", "1"],
        ["1", "cpu", "64", "1"],
    ]
    commands = calls.read_text().splitlines()
    assert len(commands) == 6  # failed combinations are tried again
    assert "--model.zero.offload.optimizer cpu --model.lora.rank 64 --max_steps 2" in commands[1]
