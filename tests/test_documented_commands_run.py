"""The short commands of README and docs run without changes.

They run in a directory like a checkout after a run of all steps, where the models that the pages
name are tiny models. Commands that need much time, a network or a GPU are in `ELSEWHERE`, with the
tests that run them.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest

from pipeline.plan.request import parse_request
from pipeline.plan.stage import drop_unselected, split_methods
from tests.commands import run_command
from tests.families import tiny_causal_lm, tiny_config
from tests.pipeline.data.tokenizers import byte_level
from tests.test_documented_commands import FILES, ROOT, command_lines
from tests.test_end_to_end import SHORT as SHORT_STEPS
from train import STAGES

SHORT = [word for words in SHORT_STEPS.values() for word in words]

ELSEWHERE = {
    "--step 0 1 2 3": "tests/step0_pretrain/test_with_other_steps.py, in a short form",
    "make ": "CI and users; recipes are parsed in tests/test_documented_commands.py",
    "hf download": "Hub",
    "curl -L": "GitHub",
    "pytest -q": "the same",
    "venv": "make, and the chat.py below",
    "pip install": "make, and tests/test_package.py",
    "torchrun ": "the same steps, in tests/faults/ and tests/test_resume.py",
    "bash scripts/": "tests/test_configs.py",
    "sbatch ": "tests/pipeline/launch/test_layout.py, without SLURM itself",
    "--deployment-type multi_node --hostfile": "tests/faults/test_many_machines.py",
    "--deployment-type ray": "tests/faults/test_on_ray.py",
    "--deployment-type kubernetes": "tests/pipeline/launch/test_kubernetes.py",
    "python -m pipeline.launch.cluster": "tests/pipeline/launch/test_cluster.py",
    "--include localhost:0,2": "tests/pipeline/launch/, as two GPUs are needed",
    "--autotune": "tests/pipeline/plan/",
    "--path ADAPTER --to merged": "tests/pipeline/export/test_weights.py",
    "--to adapter": "tests/pipeline/export/test_weights.py, as the run here has no adapter",
    "python -m step3_ppo.train ... --guards": "tests/step3_ppo/test_rollback.py",
    "--path OUT/step2_reward --data-path held_out.csv": "tests/step2_reward/test_lab.py",
    "--ppo.advantage": "tests/step3_ppo/, and tests/test_steps_at_every_stage.py",
    "--zero-config ds_config.json": "tests/test_end_to_end.py, in a short form",
    "--lora 16": "tests/test_end_to_end.py, in a short form",
    "--actor-model facebook/opt-1.3b --reward-model facebook/opt-350m": "Hub",
    "--actor-zero-stage 3": "tests/test_steps_at_every_stage.py",
    "--config my.yaml": "tests/test_train_cli.py",
    "--replicas 2": "tests/test_steps_at_every_stage.py",
    "--tensor-parallel 2": "test_tensor_parallel.py of each step",
    "--sft.parallel.tp 2": "tests/step1_sft/test_tensor_parallel.py",
    "--threads 1": "tests/pipeline/system/test_torch_process.py",
    "--save-every": "tests/test_resume.py",
    "... --resume": "tests/test_resume.py",
    "--step 1 --deployment-type single_node": "tests/test_end_to_end.py, in a short form",
    "--method ppo grpo": "tests/test_methods_end_to_end.py, in a short form",
    "--path out --method grpo": "tests/pipeline/report/test_find_model.py",
    "--ppo.eval_tasks": "tests/evaluation/test_in_training.py",
    "--judge score.py:check": "tests/evaluation/test_winrate.py",
    "https://HOST/v1": "tests/rewards/test_endpoints.py",
    "rewards.select": "tests/rewards/test_select.py, as a model that knows nothing chooses nothing",
    "--data-path correct.jsonl": "a run on the rows of the command before",
    "ratings.jsonl": "tests/inference/test_ratings.py, as a run has none yet",
    "inference.serve": "tests/inference/serve/test_command.py, as a server does not end",
    "--config arithmetic-grpo.yaml": "minutes; as a dry run in tests/test_train_cli.py",
    "steps.jsonl": "tests/step2_reward/test_steps.py, as the run here has no such rows",
    "--ppo.reward.path OUT/step2_reward ...": "tests/step3_ppo/test_class_rewards.py",
    "--push-to-hub": "tests/pipeline/run/test_push.py",
    "hf auth": "Hub",
    "--teacher": "tests/step3_ppo/test_distill.py",
    "--environment": "tests/test_environments_end_to_end.py, in a short form",
}
"""Parts of commands that are not run here, with the test that does or the reason."""

FEW_STEPS = {
    **SHORT_STEPS,
    "pretrain": ["--pretrain.max_steps", "2"],
    "python -m step0_pretrain.train": ["--max_steps", "2"],
    "preference": ["--preference.max_steps", "2", "--preference.data.max_eval_rows", "16"],
    "python -m step2_reward.train": ["--max_steps", "2"],
    "python -m step3_ppo.train": [
        *("--max_steps", "2", "--data.max_eval_rows", "16", "--rollout_size", "16"),
        *("--batch_size", "8", "--max_prompt_length", "100", "--max_new_tokens", "16"),
    ],
}
"""Options appended to a page's command, so that it trains for a few steps instead of minutes."""

MODELS = ("DIR", "BASE", "facebook/opt-125m", "facebook/opt-350m", "facebook/opt-1.3b")
MODELS += ("facebook/opt-13b", "STUDENT", "TEACHER")


def all_commands() -> dict[str, str]:
    """Return the first page of every distinct documented command, with normalized whitespace."""
    pages: dict[str, str] = {}
    for page, line in command_lines():
        pages.setdefault(" ".join(line.split()), page)
    return pages


def shorten(command: str) -> str:
    """Return the command for a few steps, with a new output directory if it names none."""
    name = "out-" + re.sub(r"\W+", "-", command)[-80:]
    command = command.replace(" ... ", " ").removesuffix(" ...")
    program, *rest = shlex.split(command)
    if rest[0] == "train.py":
        request = parse_request(rest[1:], STAGES).request
        stages = drop_unselected(STAGES, request.step, ())
        sections = {stage.section for stage in split_methods(stages, request.method)}
        few_steps = [word for section in sections for word in FEW_STEPS.get(section, [])]
        few_steps = [] if "--dry-run" in rest else few_steps
        output = [] if "--output-dir" in rest else ["--output-dir", name]
    else:
        few_steps, output = FEW_STEPS.get(" ".join([program, *rest[:2]]), []), []
    return f"{command} {shlex.join([*few_steps, *output])}"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory like a checkout, with a finished run in OUT and tiny models."""
    home = tmp_path_factory.mktemp("checkout")
    for name in ("train.py", "chat.py", "configs", "scripts"):
        (home / name).symlink_to(ROOT / name)
    result = run("python train.py --output-dir OUT --save-every 1 " + shlex.join(SHORT), home)
    assert result.returncode == 0, result.stderr
    for name, text in FILES.items():
        (home / name).write_text(text)
    rows = [
        {"prompt": f"What is {n} + 1?", "chosen": f"{n + 1}.", "rejected": "No.", "answer": n + 1}
        for n in range(40)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("my.jsonl", "pairs.jsonl", "IN.jsonl", "rows.jsonl"):
        (home / name).write_text(lines)
    rated = [{"prompt": f"{n} + 1?", "response": f"{n + 1}", "label": n % 3 > 0} for n in range(40)]
    (home / "labeled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rated))
    table = "prompt,response,label\n" + "".join(f"{n} + 1?,{n + 1},{n % 3}\n" for n in range(40))
    for name in ("rows.csv", "held_out.csv"):
        (home / name).write_text(table)
    (source,) = re.findall(r"```python\n(# score\.py\n.*?)```", REWARDS.read_text(), re.DOTALL)
    (home / "score.py").write_text(source + CHECK)
    gsm8k = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(40)]
    (home / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in gsm8k))
    texts = "".join(json.dumps({"text": f"{n} + 1 is {n + 1}."}) + "\n" for n in range(40))
    (home / "corpus").mkdir()
    for name in ("corpus/a.jsonl", "code.jsonl"):
        (home / name).write_text(texts)
    tokenizer = byte_level(bos=True)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 2048}
    for name in MODELS:
        tokenizer.save_pretrained(home / name)
        tiny_config("opt", **sizes).save_pretrained(home / name)
    for name in ("DIR", "BASE", "facebook/opt-1.3b", "STUDENT", "TEACHER"):
        tiny_causal_lm("opt", **sizes).save_pretrained(home / name)
    return home


REWARDS = ROOT / "docs" / "rewards.md"

CHECK = """
def check(episodes):
    return [float(len(episode.response) > 3) for episode in episodes]
"""
"""The reward function that several pages name, in addition to that of docs/rewards.md."""


def run(command: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of a page, in the environment of the tests; by bash only if it needs a shell."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    program, *argv = shlex.split(command)
    if program == "python" and re.search(r"[|<>;&$*]", command) is None:
        return run_command(*argv, cwd=home, env=env)
    shell = ["bash", "-c", command]
    return subprocess.run(
        shell, cwd=home, env=env, input="", capture_output=True, text=True, check=False
    )


def run_page(commands: list[str], home: Path) -> list[str]:
    """Run a page's commands in order; return those that fail, with the ends of their errors."""
    results = [(command, run(shorten(command), home)) for command in commands]
    return [f"{name}: {done.stderr[-600:]}" for name, done in results if done.returncode != 0]


@pytest.mark.grid
@pytest.mark.timeout(3600)
def test_short_documented_commands_run(checkout: Path) -> None:
    pages: dict[str, list[str]] = {}
    for command, page in all_commands().items():
        if not any(part in command for part in ELSEWHERE):
            pages.setdefault(page, []).append(command)

    with ThreadPoolExecutor(2) as pool:
        failed = [*chain(*pool.map(lambda page: run_page(pages[page], checkout), pages))]

    assert not failed, "\n".join(failed)
    assert sum(map(len, pages.values())) >= 20, pages


def test_skipped_commands_are_documented_and_the_tests_named_for_them_exist() -> None:
    stale = [part for part in ELSEWHERE if not any(part in command for command in all_commands())]
    paths = [path for reason in ELSEWHERE.values() for path in re.findall(r"tests/[\w./]+", reason)]

    assert stale == []
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []
