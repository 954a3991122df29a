"""Plans of several methods: their settings, errors, and finished methods."""

from pathlib import Path

import pytest
import yaml

from pipeline.plan.plan import Plan, make_plan
from pipeline.settings.fields import flatten, to_plain
from pipeline.system.errors import UserError
from train import STAGES


def make(out: Path, *argv: str) -> Plan:
    return make_plan(["--output-dir", str(out / "out"), *argv], STAGES)


def step3(plan: Plan) -> dict[str, dict[str, object]]:
    """Return the settings of each step 3, by its name."""
    return {
        stage.name: flatten(to_plain(plan.configs[stage.name]))
        for stage in plan.stages
        if stage.number == 3
    }


def test_each_method_has_its_preset_and_the_common_settings(tmp_path: Path) -> None:
    plan = make(tmp_path, "--method", "ppo", "rloo", "dr_grpo", "--ppo.max_steps", "9")

    steps = step3(plan)
    assert [stage.name for stage in plan.stages] == [
        *("step1_sft", "step2_reward"),
        *("step3_ppo", "step3_rloo", "step3_dr_grpo"),
    ]
    assert [step["method"] for step in steps.values()] == ["ppo", "rloo", "dr_grpo"]
    assert [step["kl_coef"] for step in steps.values()] == [0.1, 0.05, 0.1]  # embedded.yaml's
    for name, step in steps.items():
        assert step["max_steps"] == 9
        assert step["output_dir"] == str(tmp_path / "out" / name)
        assert step["actor.path"] == str(tmp_path / "out" / "step1_sft")
        assert step["reward.path"] == str(tmp_path / "out" / "step2_reward")


def test_settings_of_a_method_override_common_ones_of_the_same_layer(tmp_path: Path) -> None:
    low, high = tmp_path / "low.yaml", tmp_path / "high.yaml"
    low.write_text(
        "method: [grpo, rloo]\nppo: {batch_size: 8}\n"
        "methods:\n  grpo: {batch_size: 16, kl_coef: 0.5, seed: 3}\n  raft: {kl_coef: 9.0}\n"
    )
    high.write_text("ppo: {kl_coef: 0.6}\n")
    files = ("--config", str(low), str(high))

    by_files = step3(make(tmp_path, *files))
    by_options = step3(make(tmp_path, *files, "--methods.grpo.kl_coef", "1", "--ppo.kl_coef", "2"))

    assert [step["batch_size"] for step in by_files.values()] == [16, 8]
    assert [step["kl_coef"] for step in by_files.values()] == [0.6, 0.6]  # the later file
    assert [step["kl_coef"] for step in by_options.values()] == [1.0, 2.0]
    assert [step["seed"] for step in by_options.values()] == [3, 1234]


ERRORS = {
    "--method ppo gpro": "--method gpro: no such method; did you mean gspo?",
    "--method dpo,rloo": "--method dpo,rloo: no such method; pass separate values: dpo rloo",
    "--method ppo ppo": "--method lists ppo twice",
    "--method ppo grpo --methods.rloo.clip 0.1": (
        "--methods.rloo.clip is for a method that does not run; add rloo to --method"
    ),
    "--method ppo grpo --ppo.method rloo": (
        "method ppo: ppo.method can't be set when --method names several methods; omit it"
    ),
    "--method ppo grpo dapo --methods.grpo.foo 1": (
        "method grpo: there is no setting ppo.foo; --help lists the settings"
    ),
    "--method ppo grpo rloo --ppo.gamma 0.9": (
        "method grpo: ppo.gamma 0.9 discounts later rewards, but ppo.advantage dr_grpo"
        " sums a response's rewards undiscounted; leave it at 1"
    ),
}


@pytest.mark.parametrize("argv", ERRORS)
def test_contradiction_raises_with_the_method(argv: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        make(tmp_path, *argv.split())

    assert str(error.value) == ERRORS[argv]


def test_finished_methods_are_skipped_and_others_run(tmp_path: Path) -> None:
    first = make(tmp_path, "--method", "ppo", "grpo", "--step", "3", *_MODELS)
    for stage in first.stages:
        directory = tmp_path / "out" / stage.name
        directory.mkdir(parents=True)
        settings = to_plain(first.configs[stage.name])
        (directory / "config.yaml").write_text(yaml.safe_dump(settings))
        (directory / "result.json").write_text("{}")
    (tmp_path / "out" / "step3_ppo" / "result.json").unlink()

    words = ("--step", "3", *_MODELS, "--resume")
    resumed = make(tmp_path, "--method", "rloo", "ppo", "grpo", *words)
    others = make(tmp_path, "--method", "dapo", "rloo", "--step", "3", *_MODELS)

    assert resumed.finished == {"step3_grpo"}
    assert others.finished == set()  # finished methods that aren't selected don't conflict
    with pytest.raises(UserError, match=r"step 3 in \S+/step3_grpo was finished with ppo.clip 0.2"):
        make(tmp_path, "--method", "ppo", "grpo", *words, "--methods.grpo.clip", "0.1")


_MODELS = [word for role in ("actor", "critic", "reward") for word in (f"--ppo.{role}.path", "a/b")]
