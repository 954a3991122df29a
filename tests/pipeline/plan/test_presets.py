"""The embedded model's preset is for that model alone, however a step's model is named."""

import json
import shlex
from pathlib import Path

import pytest

from pipeline.cli.options import parse_step, write_config
from pipeline.config import StepConfig
from pipeline.plan.output import record_command, with_last_options
from pipeline.plan.plan import Plan, make_plan
from pipeline.settings.fields import flatten, to_plain
from pipeline.system.errors import ConfigError, ModelError
from step2_reward.config import RewardConfig
from step3_ppo.config import PPOConfig
from step3_preference.config import PreferenceConfig
from train import STAGES

OWN = "facebook/opt-125m"
MATH = ("--reward", "math")
NUMBERS = {"max_steps", "max_new_tokens", "data.max_length", "model.optim.lr", "actor.optim.lr"}
"""Settings that the preset has for every step, where the step has them."""


def planned(out: Path, *argv: str) -> tuple[Plan, dict[str, dict[str, object]]]:
    plan = make_plan(["--output-dir", str(out), *argv], STAGES)
    return plan, {name: flatten(to_plain(config)) for name, config in plan.configs.items()}


def default_numbers(config: StepConfig) -> dict[str, object]:
    return {name: value for name, value in flatten(to_plain(config)).items() if name in NUMBERS}


def file_of(directory: Path, text: str) -> str:
    path = directory / "mine.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("argv", "text", "config"),
    [
        (("dpo", "--preference.model.path", OWN), "", PreferenceConfig()),
        (("orpo", "--actor-model", OWN), "", PreferenceConfig()),
        (("dpo",), f"preference: {{model: {{path: {OWN}}}}}", PreferenceConfig()),
        (("dpo",), f"methods: {{dpo: {{model: {{path: {OWN}}}}}}}", PreferenceConfig()),
        (("grpo", *MATH, "--ppo.actor.path", OWN), "", PPOConfig(max_new_tokens=1024)),
        (("grpo", *MATH, "--actor-model", OWN), "", PPOConfig(max_new_tokens=1024)),
    ],
)
def test_step_3_on_a_model_of_the_users_own_has_its_own_defaults_and_starts_from_it(
    tmp_path: Path, argv: tuple[str, ...], text: str, config: StepConfig
) -> None:
    files = ("--config", file_of(tmp_path, text)) if text else ()

    plan, settings = planned(tmp_path / "out", "--step", "3", "--method", *argv, *files)

    (step,) = (settings[stage.name] for stage in plan.stages)
    assert {name: step[name] for name in step if name in NUMBERS} == default_numbers(config)
    assert step["data.path"] == ["Dahoas/rm-static"]
    assert OWN in (step.get("model.path"), step.get("actor.path"))
    assert step["base.path"] is None  # there was no step before it
    assert step.get("shares", [1, 2, 3]) == [1, 2, 3]  # which no other step learned from
    assert not any("preset" in note for note in plan.notes)


OFF = ("--ppo.data.template_args", "enable_thinking=false")


@pytest.mark.parametrize(
    ("argv", "template", "tokens"),
    [
        (MATH, "<think>{% if add_generation_prompt %}", 1024),
        (MATH, "{% if add_generation_prompt %}<think>", 4096),
        (MATH, "{{ enable_thinking }}", 4096),
        (MATH, "{% set thinking = false %}{% if add_generation_prompt %}<think>", 1024),
        ((*MATH, *OFF), "{{ enable_thinking }}", 1024),
        ((*MATH, "--ppo.max_prompt_length", "8000"), "", 192),
        (("--reward", "model", "--reward-model", OWN), "", 256),
    ],
)
def test_the_length_of_responses_is_by_the_kind_of_the_users_model(
    tmp_path: Path, argv: tuple[str, ...], template: str, tokens: int
) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8192}')
    (tmp_path / "chat_template.jinja").write_text(template)
    run = ("--step", "3", "--method", "grpo", "--actor-model", str(tmp_path), *argv)
    plan, settings = planned(tmp_path / "out", *run)

    assert settings["step3_ppo"]["max_new_tokens"] == tokens
    assert any(f"up to {tokens:,} tokens" in note for note in plan.notes) == (tokens != 256)


def test_a_preset_is_for_the_models_that_come_from_the_embedded_one(tmp_path: Path) -> None:
    plan, mixed = planned(tmp_path, "--reward-model", OWN)
    reward = RewardConfig()

    assert plan.notes == ("preset configs/embedded.yaml, for the embedded model: step 1, step 3",)
    assert mixed["step1_sft"]["model.optim.lr"] == 3e-3
    assert mixed["step2_reward"]["model.optim.lr"] == reward.model.optim.lr == 1e-5
    assert (mixed["step3_ppo"]["actor.optim.lr"], mixed["step3_ppo"]["max_steps"]) == (2e-4, 40)
    assert mixed["step3_ppo"]["critic.optim.lr"] == 9e-6  # which starts from the reward model
    assert all(step["data.path"] == ["embedded"] for step in mixed.values())


@pytest.mark.parametrize(("started_from", "lr"), [(OWN, 1e-5), ("embedded", 7e-4)])
def test_a_step_whose_model_an_earlier_run_made_follows_the_record(
    tmp_path: Path, started_from: str, lr: float
) -> None:
    record(tmp_path / "out", planned(tmp_path / "out", "--actor-model", started_from)[0])
    again = ("--step", "2", "--overwrite", "--data-path", "embedded")
    elsewhere = ("--step", "2", "--reward-model", f"{tmp_path}/out/step1_sft")

    assert planned(tmp_path / "out", *again)[1]["step2_reward"]["model.optim.lr"] == lr
    assert planned(tmp_path / "new", *elsewhere)[1]["step2_reward"]["model.optim.lr"] == lr


def record(out: Path, plan: Plan) -> None:
    """Write the output of step 1 without weights."""
    write_config(plan.configs["step1_sft"], out / "step1_sft" / "config.yaml")
    for name in ("config.json", "result.json"):
        (out / "step1_sft" / name).write_text(json.dumps({"seconds": 1}))


def test_a_reward_model_stands_for_step_2_and_ppo_needs_no_other_step(tmp_path: Path) -> None:
    models = ("--actor-model", OWN, "--reward-model", "facebook/opt-350m")
    plan, settings = planned(tmp_path, "--step", "3", *models)
    ppo = settings["step3_ppo"]

    assert [ppo[f"{role}.path"] for role in ("actor", "critic", "reward")] == [
        OWN,
        *["facebook/opt-350m"] * 2,
    ]
    assert f"step 3 uses {OWN} as its actor: {tmp_path} has no output" in plan.notes[0]
    dotted = ("--ppo.actor.path", OWN, "--ppo.reward.path", "facebook/opt-350m")
    assert planned(tmp_path, "--step", "3", *dotted)[1]["step3_ppo"]["critic.path"] == models[3]
    own = planned(tmp_path, *dotted)[1]["step3_ppo"]
    assert own["critic.path"] == f"{tmp_path}/step2_reward"


def test_a_critic_without_a_reward_model_starts_from_the_actors_model(tmp_path: Path) -> None:
    for option in ("--actor-model", "--ppo.actor.path"):
        ppo = planned(tmp_path, "--step", "3", option, OWN, *MATH)[1]["step3_ppo"]
        assert ppo["critic.path"] == OWN


def test_step_2_reads_its_own_model_alone(tmp_path: Path) -> None:
    alone = planned(tmp_path, "--step", "2", "--reward-model", OWN)[1]["step2_reward"]
    with_actor = ("--step", "2", "--actor-model", OWN, "--reward-model", "facebook/opt-350m")
    both = planned(tmp_path, *with_actor)[1]["step2_reward"]
    actor = planned(tmp_path, "--step", "2", "--actor-model", OWN)[1]["step2_reward"]

    assert alone["model.path"] == OWN
    assert alone["data.path"] == ["Dahoas/rm-static"]
    assert both["model.path"] == "facebook/opt-350m"
    assert actor["model.path"] == OWN


def test_an_output_of_step_1_wins_over_the_model_it_started_from(tmp_path: Path) -> None:
    record(tmp_path, planned(tmp_path, "--actor-model", OWN)[0])

    plan, settings = planned(tmp_path, "--step", "3", "--actor-model", OWN, *MATH)

    assert settings["step3_ppo"]["actor.path"] == str(tmp_path / "step1_sft")
    assert settings["step3_ppo"]["base.path"] == OWN
    assert not any("as its actor" in note for note in plan.notes)


def test_the_command_that_finishes_a_step_has_the_settings_it_began_with(tmp_path: Path) -> None:
    models = ("--output-dir", str(tmp_path), "--actor-model", OWN)
    begun = [*models, "--step", "2", "--lr", "3e-4", "--eval-path", "d/e"]
    plan = make_plan(begun, STAGES)
    file = tmp_path / "step2_reward" / "config.yaml"
    write_config(plan.configs["step2_reward"], file)

    def hint() -> list[str]:
        with pytest.raises(ModelError, match="has an unfinished one; finish it with") as error:
            make_plan([*models, "--step", "3", "--eval-path", "d/e"], STAGES)
        return shlex.split(str(error.value).split("`")[1])

    assert hint() == ["python", "-m", "step2_reward.train", "--config", str(file), "--resume"]
    assert parse_step(RewardConfig, ["--config", str(file)]) == plan.configs["step2_reward"]
    record_command(tmp_path, begun)
    _, program, *options = hint()
    resumed = make_plan(with_last_options(options), STAGES)
    assert (program, options) == ("train.py", ["--output-dir", str(tmp_path), "--resume"])
    assert [stage.name for stage in resumed.stages] == ["step2_reward"]
    assert resumed.configs == plan.configs


def test_other_rows_for_step_3_name_its_own_setting(tmp_path: Path) -> None:
    models = ("--actor-model", OWN, "--data-path", "a/b", "--eval-path", "d/e")
    record(tmp_path, planned(tmp_path, *models)[0])
    dpo = ("--step", "3", "--method", "dpo")

    named = r"with --preference\.data\.path and --preference\.data\.eval_path for other rows"
    for other in ([*models[:-1], "f/g"], [*models[:3], "x/y", *models[4:]]):
        with pytest.raises(ConfigError, match=named):
            planned(tmp_path, *dpo, *other)

    own = ("--preference.data.path", "x/y", "--preference.data.eval_path", "f/g")
    assert planned(tmp_path, *dpo, *models, *own)[1]["step3_dpo"]["data.path"] == ["x/y"]
