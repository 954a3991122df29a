"""Checks of all steps before the first one; nothing here loads weights or trains."""

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
    """A valid model directory."""
    directory = tmp_path_factory.mktemp("models") / "valid"
    tokenizer = build_tokenizer()
    build_model(vocab_size=len(tokenizer), seed=0).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 pairs with different prompts."""
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


def get_error(out: Path, *argv: str) -> str:
    with pytest.raises(UserError) as error:
        previews(out, *argv)
    return str(error.value)


def test_valid_plan_reports_rows_steps_and_tokens(
    tmp_path: Path, model: Path, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pairs.parent.parent)
    argv = ["--actor-model", str(model), "--data-path", f"{pairs.parent.name}@train"]
    short = ["--ppo.max_new_tokens", "24", "--ppo.max_prompt_length", "64", "--max-length", "64"]
    checked = plan(tmp_path, *argv, *short, "--epochs", "2")

    previews = check(checked)

    rows = [len(preview.data.train) for preview in previews.values() if preview.data]
    held_out = {len(preview.data.eval) for preview in previews.values() if preview.data}
    assert len(held_out) == 1  # the same rows for all steps, about a tenth
    assert sum(rows) + held_out.pop() == 100
    configs = [checked.configs[name] for name in previews]
    # 2 passes over the rows, in steps of 32 rows, 32 pairs and 128 prompts, rounded up.
    sizes = (32, 32, 128)
    steps = [x.steps(config) for x, config in zip(previews.values(), configs, strict=True)]
    assert steps == [-(-2 * count // size) for count, size in zip(rows, sizes, strict=True)]
    sft, reward, ppo = (preview.row_tokens or 0.0 for preview in previews.values())
    assert 64 >= sft > ppo > 0
    assert reward > sft


ERRORS: tuple[tuple[str, str], ...] = (
    ("--ppo.data.format chatm", "--format chatm is neither a Jinja file nor one of auto,"),
    (
        "--ppo.max_new_tokens 500",
        f"ppo.max_prompt_length 256 + ppo.max_new_tokens 500 exceeds the {CONTEXT}-token context of"
        " the actor {out}/step1_sft; lower one of them",
    ),
    (
        "--reward.data.format llama2 --ppo.max_new_tokens 9 --ppo.max_prompt_length 64",
        "the actor would read dialogues in a chat format other than the one that {out}/step2_",
    ),
    (
        "--deployment-type single_node --num-processes 4 --ppo.parallel.replicas 3",
        "ppo.parallel.replicas 3 doesn't divide the 4 processes; use 2, or start a different",
    ),
    (
        "--deployment-type single_node --num-processes 2 --ppo.advantage grpo --ppo.group_size 8"
        " --ppo.rollout_size 8 --ppo.batch_size 8",
        "ppo.rollout_size 8 in groups of 8 leaves some of the 2 data-parallel",
    ),
)
"""Errors of later steps, and a part of each message."""


@pytest.mark.parametrize(("argv", "message"), ERRORS)
def test_errors_of_later_steps_are_raised_before_the_first(
    tmp_path: Path, model: Path, pairs: Path, argv: str, message: str
) -> None:
    valid = ["--actor-model", str(model), "--data-path", str(pairs), "--max-length", "64"]

    error = get_error(tmp_path / "out", *valid, *argv.split())

    assert message.replace("{out}", f"{tmp_path}/out") in error


def test_processes_of_a_tensor_parallel_group_share_prompts(tmp_path: Path) -> None:
    argv = ["--actor-model", "embedded", "--output-dir", str(tmp_path), "--plan-for", "8xA100-80GB"]
    argv += ["--tensor-parallel", "4", "--ppo.rollout_size", "4", "--ppo.batch_size", "4"]
    for size in ("1", "2", "4"):
        plan = make_plan([*argv, "--ppo.inference_tp_size", size], STAGES)

        check_settings(plan)
        generation = plan.configs["step3_ppo"].workload(8).generation
        assert generation.max_concurrent == 2  # the prompts of a group of four processes
