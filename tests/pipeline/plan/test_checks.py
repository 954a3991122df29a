"""A plan is checked whole before its first step: nothing here loads weights or trains."""

import json
from pathlib import Path

import pytest

from pipeline.demo.model import CONTEXT, build_model, build_tokenizer
from pipeline.plan.checks import Preview, check_rows, check_settings
from pipeline.plan.plan import Plan, make_plan
from pipeline.system.errors import UserError
from train import STAGES


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory, sound in all its parts."""
    directory = tmp_path_factory.mktemp("models") / "sound"
    tokenizer = build_tokenizer()
    build_model(vocab_size=len(tokenizer), seed=0).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 pairs, no two of the same prompt."""
    file = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    rows = [
        {"prompt": f"What is {n} + {n}?", "chosen": f"It is {2 * n}.", "rejected": "No."}
        for n in range(100)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def plan(out: Path, *argv: str) -> Plan:
    return make_plan(["--output-dir", str(out), *argv], STAGES)


def previews(out: Path, *argv: str) -> dict[str, Preview]:
    return check(plan(out, *argv))


def check(plan: Plan) -> dict[str, Preview]:
    check_settings(plan)
    return dict(check_rows(plan, downloads=False))


def complaint(out: Path, *argv: str) -> str:
    with pytest.raises(UserError) as error:
        previews(out, *argv)
    return str(error.value)


def test_what_is_sound_passes_and_its_rows_steps_and_tokens_are_known(
    tmp_path: Path, model: Path, pairs: Path
) -> None:
    argv = ["--actor-model", str(model), "--data-path", str(pairs), "--max-length", "64"]
    short = ["--ppo.max_new_tokens", "24", "--ppo.max_prompt_length", "64"]
    made = plan(tmp_path, *argv, *short, "--epochs", "2")

    seen = check(made)

    rows = [len(each.data.train) for each in seen.values() if each.data]
    held_out = {len(each.data.eval) for each in seen.values() if each.data}
    assert len(held_out) == 1  # the same rows for all steps, about a tenth
    assert sum(rows) + held_out.pop() == 100
    configs = [made.configs[name] for name in seen]
    # 2 passes over the rows, cut into steps of 32 rows, 32 pairs and 128 prompts, rounded up.
    sizes = (32, 32, 128)
    steps = [each.steps(config) for each, config in zip(seen.values(), configs, strict=True)]
    assert steps == [-(-2 * count // size) for count, size in zip(rows, sizes, strict=True)]
    sft, reward, ppo = (each.row_tokens or 0.0 for each in seen.values())
    assert 64 >= sft > ppo > 0
    assert reward > sft


WRONG: tuple[tuple[str, str], ...] = (
    ("--ppo.data.format chatm", "--format chatm is neither a Jinja file nor one of auto,"),
    (
        "--ppo.max_new_tokens 500",
        f"ppo.max_prompt_length 256 + ppo.max_new_tokens 500 exceeds the {CONTEXT}-token context of"
        " the actor {out}/step1_sft; lower one of them",
    ),
    (
        "--reward.data.format llama2 --ppo.max_new_tokens 9 --ppo.max_prompt_length 64",
        "the actor would read dialogues in a different chat format from {out}/step2_reward's",
    ),
    (
        "--deployment-type single_node --num-processes 4 --ppo.parallel.replicas 3",
        "ppo.parallel.replicas 3 doesn't divide the 4 processes; use 2, or start a different",
    ),
    (
        "--deployment-type single_node --num-processes 2 --ppo.advantage grpo --ppo.group_size 8"
        " --ppo.rollout_size 8 --ppo.batch_size 8",
        "ppo.rollout_size 8 in groups of 8 leaves some of 2 processes without a prompt; raise it",
    ),
)
"""Errors of later steps, and a part of each message."""


@pytest.mark.parametrize(("argv", "sentence"), WRONG)
def test_what_is_wrong_in_a_later_step_is_said_before_the_first(
    tmp_path: Path, model: Path, pairs: Path, argv: str, sentence: str
) -> None:
    sound = ["--actor-model", str(model), "--data-path", str(pairs), "--max-length", "64"]

    said = complaint(tmp_path / "out", *sound, *argv.split())

    assert sentence.replace("{out}", f"{tmp_path}/out") in said
