"""`train.py` as a user runs it: wrong input, plans, dry runs."""

import os
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from pipeline.demo.arithmetic import main as write_sums
from tests.commands import forking_python, run_command
from tests.families import tiny_config

TRAIN = Path(__file__).parent.parent / "train.py"


def run_train(cwd: Path, *argv: str) -> CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK")}
    return run_command(str(TRAIN), *argv, cwd=cwd, env=environment)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            "--step 2",
            "error: step 2 needs the model of step 1, and there is none in output/step1_sft",
        ),
        ("--actor-model ./none", "error: --actor-model: no such model: the"),
        ("--data-path none.jsonl", "error: --data-path none.jsonl: no such file or directory"),
        ("--ppo.kl_coeff 1", "error: there is no setting ppo.kl_coeff; did you mean ppo.kl_coef?"),
        ("--ppo.rollout_size 8", "error: ppo.batch_size"),
        (
            "--deployment-type multi_node",
            "error: --deployment-type multi_node needs --hostfile FILE, or",
        ),
        ("--config none.yaml", "error: --config none.yaml: no such file"),
    ],
)
def test_wrong_input_prints_one_sentence_and_exits_with_code_2(
    tmp_path: Path, argv: str, sentence: str
) -> None:
    result = run_train(tmp_path, *argv.split())

    assert result.returncode == 2
    assert result.stderr.startswith(sentence)
    assert (result.stderr.count("\n"), result.stdout) == (1, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.jobs
def test_plan_for_another_machine_needs_only_the_model_config(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_config("llama", vocab_size=1000).save_pretrained(model)

    result = run_train(
        tmp_path,
        *("--plan-for", "1x24GB", "--step", "1", "--actor-model", str(model)),
        *("--data-path", "embedded"),
    )

    assert (result.returncode, result.stderr) == (0, "")
    assert "unknown until" not in result.stdout
    assert "  rows       32,000 to train on, 256 held out" in result.stdout


@pytest.mark.jobs
def test_multi_node_dry_run_shows_the_command_of_each_machine(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("worker-0 slots=2\nworker-1 slots=4\n")
    result = run_train(
        tmp_path,
        *("--deployment-type", "multi_node", "--hostfile", "hosts", "--exclude", "worker-1:0"),
        *("--step", "1", "--dry-run"),
    )

    output = " ".join(result.stdout.replace("\\\n", " ").split())
    torchrun = "-m pipeline.launch.torchrun --nnodes 2 --node-rank"
    step = "-m step1_sft.train --data.max_length 80 --max_steps 500"
    assert (result.returncode, result.stderr) == (0, "")
    assert output.startswith("The plan: 1 step, 5 processes each on 2 machines, into output.")
    assert f"on worker-0 {forking_python()} {torchrun} 0 --master-addr worker-0" in output
    devices = "CUDA_VISIBLE_DEVICES=1,2,3"
    assert f"on worker-1 {devices} {forking_python()} {torchrun} 1 --master-addr worker-0" in output
    assert output.count(step) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["hosts"]


@pytest.mark.jobs
def test_arithmetic_preset_plans_with_generated_rows_and_model(tmp_path: Path) -> None:
    write_sums(["--out", str(tmp_path / "sums"), "--model", str(tmp_path / "base")])

    result = run_train(
        tmp_path,
        *("--config", "arithmetic-grpo.yaml", "--actor-model", "base", "--data-path", "sums"),
        *("--output-dir", "out", "--dry-run"),
    )

    assert (result.returncode, result.stderr) == (0, "")
    assert "The plan: 2 steps" in result.stdout
    # Both steps train on all sums that are not held out.
    assert result.stdout.count("  rows       7,588 to train on, 512 held out") == 2
    assert "150 iterations of 32 rows" in result.stdout
    assert "left out" not in result.stdout  # no prompt and no response is too long
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "sums"]
