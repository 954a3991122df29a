"""The preset of the embedded model applies only to that model, however a model is given."""

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

MODEL = "facebook/opt-125m"
MATH = ("--reward", "math")
PRESET = {"max_steps", "max_new_tokens", "data.max_length", "model.optim.lr", "actor.optim.lr"}
"""Settings that the preset changes in every step that has them."""


def plan_settings(out: Path, *argv: str) -> tuple[Plan, dict[str, dict[str, object]]]:
    plan = make_plan(["--output-dir", str(out), *argv], STAGES)
    return plan, {name: flatten(to_plain(config)) for name, config in plan.configs.items()}


@pytest.mark.parametrize(
    ("argv", "text", "config"),
    [
        (("dpo", "--preference.model.path", MODEL), "", PreferenceConfig()),
        (("orpo", "--actor-model", MODEL), "", PreferenceConfig()),
        (("dpo",), f"preference: {{model: {{path: {MODEL}}}}}", PreferenceConfig()),
        (("dpo",), f"methods: {{dpo: {{model: {{path: {MODEL}}}}}}}", PreferenceConfig()),
        (("grpo", *MATH, "--ppo.actor.path", MODEL), "", PPOConfig(max_new_tokens=1024)),
        (("grpo", *MATH, "--actor-model", MODEL), "", PPOConfig(max_new_tokens=1024)),
    ],
)
def test_step_3_with_another_model_has_no_preset_and_starts_from_it(
    tmp_path: Path, argv: tuple[str, ...], text: str, config: StepConfig
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    files = ("--config", str(path)) if text else ()

    plan, settings = plan_settings(tmp_path / "out", "--step", "3", "--method", *argv, *files)

    (step,) = (settings[stage.name] for stage in plan.stages)
    assert {name: step[name] for name in step if name in PRESET} == {
        name: value for name, value in flatten(to_plain(config)).items() if name in PRESET
    }
    assert step["data.path"] == ["Dahoas/rm-static"]
    assert MODEL in (step.get("model.path"), step.get("actor.path"))
    assert step["base.path"] is None  # there was no step before it
    assert step.get("shares", [1, 2, 3]) == [1, 2, 3]  # as no other step trained on them
    assert not any("preset" in note for note in plan.notes)


THINKING_OFF = ("--ppo.data.template_args", "enable_thinking=false")


@pytest.mark.parametrize(
    ("argv", "template", "tokens"),
    [
        (MATH, "<think>{% if add_generation_prompt %}", 1024),
        (MATH, "{% if add_generation_prompt %}<think>", 4096),
        (MATH, "{{ enable_thinking }}", 4096),
        (MATH, "{% set thinking = false %}{% if add_generation_prompt %}<think>", 1024),
        ((*MATH, *THINKING_OFF), "{{ enable_thinking }}", 1024),
        ((*MATH, "--ppo.max_prompt_length", "8000"), "", 192),
        (("--reward", "model", "--reward-model", MODEL), "", 256),
    ],
)
def test_response_length_depends_on_the_kind_of_model(
    tmp_path: Path, argv: tuple[str, ...], template: str, tokens: int
) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8192}')
    (tmp_path / "chat_template.jinja").write_text(template)
    run = ("--step", "3", "--method", "grpo", "--actor-model", str(tmp_path), *argv)
    plan, settings = plan_settings(tmp_path / "out", *run)

    assert settings["step3_ppo"]["max_new_tokens"] == tokens
    assert any(f"up to {tokens:,} tokens" in note for note in plan.notes) == (tokens != 256)


def test_preset_applies_only_to_models_derived_from_the_embedded_one(tmp_path: Path) -> None:
    plan, mixed = plan_settings(tmp_path, "--reward-model", MODEL)
    reward = RewardConfig()

    assert plan.notes == ("preset configs/embedded.yaml, for the embedded model: step 1, step 3",)
    assert mixed["step1_sft"]["model.optim.lr"] == 3e-3
    assert mixed["step2_reward"]["model.optim.lr"] == reward.model.optim.lr == 1e-5
    assert (mixed["step3_ppo"]["actor.optim.lr"], mixed["step3_ppo"]["max_steps"]) == (4e-4, 24)
    assert mixed["step3_ppo"]["critic.optim.lr"] == 9e-6  # which starts from the reward model
    assert all(step["data.path"] == ["embedded"] for step in mixed.values())


@pytest.mark.parametrize(("start_model", "lr"), [(MODEL, 1e-5), ("embedded", 7e-4)])
def test_preset_depends_on_how_the_model_of_an_earlier_run_started(
    tmp_path: Path, start_model: str, lr: float
) -> None:
    write_step_1(tmp_path / "out", plan_settings(tmp_path / "out", "--actor-model", start_model)[0])
    same_run = ("--step", "2", "--overwrite", "--data-path", "embedded")
    other_run = ("--step", "2", "--reward-model", f"{tmp_path}/out/step1_sft")

    assert plan_settings(tmp_path / "out", *same_run)[1]["step2_reward"]["model.optim.lr"] == lr
    assert plan_settings(tmp_path / "new", *other_run)[1]["step2_reward"]["model.optim.lr"] == lr


def write_step_1(out: Path, plan: Plan) -> None:
    """Write the output of step 1 without weights."""
    write_config(plan.configs["step1_sft"], out / "step1_sft" / "config.yaml")
    for name in ("config.json", "result.json"):
        (out / "step1_sft" / name).write_text(json.dumps({"seconds": 1}))


def test_given_models_replace_steps_1_and_2(tmp_path: Path) -> None:
    models = ("--actor-model", MODEL, "--reward-model", "facebook/opt-350m")
    plan, settings = plan_settings(tmp_path, "--step", "3", *models)
    ppo = settings["step3_ppo"]

    assert [ppo[f"{role}.path"] for role in ("actor", "critic", "reward")] == [
        MODEL,
        *["facebook/opt-350m"] * 2,
    ]
    assert f"step 3 uses {MODEL} as its actor: {tmp_path} has no output" in plan.notes[0]
    dotted = ("--ppo.actor.path", MODEL, "--ppo.reward.path", "facebook/opt-350m")
    step_3 = plan_settings(tmp_path, "--step", "3", *dotted)[1]["step3_ppo"]
    assert step_3["critic.path"] == models[3]
    all_steps = plan_settings(tmp_path, *dotted)[1]["step3_ppo"]
    assert all_steps["critic.path"] == f"{tmp_path}/step2_reward"


def test_critic_without_a_reward_model_starts_from_the_actor(tmp_path: Path) -> None:
    for option in ("--actor-model", "--ppo.actor.path"):
        ppo = plan_settings(tmp_path, "--step", "3", option, MODEL, *MATH)[1]["step3_ppo"]
        assert ppo["critic.path"] == MODEL


def test_step_2_prefers_the_reward_model_to_the_actor_model(tmp_path: Path) -> None:
    reward_only = plan_settings(tmp_path, "--step", "2", "--reward-model", MODEL)[1]["step2_reward"]
    with_actor = ("--step", "2", "--actor-model", MODEL, "--reward-model", "facebook/opt-350m")
    both = plan_settings(tmp_path, *with_actor)[1]["step2_reward"]
    actor_only = plan_settings(tmp_path, "--step", "2", "--actor-model", MODEL)[1]["step2_reward"]

    assert reward_only["model.path"] == MODEL
    assert reward_only["data.path"] == ["Dahoas/rm-static"]
    assert both["model.path"] == "facebook/opt-350m"
    assert actor_only["model.path"] == MODEL


def test_output_of_step_1_takes_precedence_over_its_start_model(tmp_path: Path) -> None:
    write_step_1(tmp_path, plan_settings(tmp_path, "--actor-model", MODEL)[0])

    plan, settings = plan_settings(tmp_path, "--step", "3", "--actor-model", MODEL, *MATH)

    assert settings["step3_ppo"]["actor.path"] == str(tmp_path / "step1_sft")
    assert settings["step3_ppo"]["base.path"] == MODEL
    assert not any("as its actor" in note for note in plan.notes)


def test_command_that_finishes_a_step_restores_its_settings(tmp_path: Path) -> None:
    models = ("--output-dir", str(tmp_path), "--actor-model", MODEL)
    command = [*models, "--step", "2", "--lr", "3e-4", "--eval-path", "d/e"]
    plan = make_plan(command, STAGES)
    file = tmp_path / "step2_reward" / "config.yaml"
    write_config(plan.configs["step2_reward"], file)

    def get_hint() -> list[str]:
        with pytest.raises(ModelError, match="has an unfinished one; finish it with") as error:
            make_plan([*models, "--step", "3", "--eval-path", "d/e"], STAGES)
        return shlex.split(str(error.value).split("`")[1])

    assert get_hint() == ["python", "-m", "step2_reward.train", "--config", str(file), "--resume"]
    assert parse_step(RewardConfig, ["--config", str(file)]) == plan.configs["step2_reward"]
    record_command(tmp_path, command)
    _, program, *options = get_hint()
    resumed = make_plan(with_last_options(options), STAGES)
    assert (program, options) == ("train.py", ["--output-dir", str(tmp_path), "--resume"])
    assert [stage.name for stage in resumed.stages] == ["step2_reward"]
    assert resumed.configs == plan.configs


def test_other_rows_for_step_3_raise_with_the_setting_to_use(tmp_path: Path) -> None:
    models = ("--actor-model", MODEL, "--data-path", "a/b", "--eval-path", "d/e")
    write_step_1(tmp_path, plan_settings(tmp_path, *models)[0])
    dpo = ("--step", "3", "--method", "dpo")

    hint = r"step 3, pass --preference\.data\.path and --preference\.data\.eval_path"
    for changed in ([*models[:-1], "f/g"], [*models[:3], "x/y", *models[4:]]):
        with pytest.raises(ConfigError, match=hint):
            plan_settings(tmp_path, *dpo, *changed)

    rows = ("--preference.data.path", "x/y", "--preference.data.eval_path", "f/g")
    assert plan_settings(tmp_path, *dpo, *models, *rows)[1]["step3_dpo"]["data.path"] == ["x/y"]
