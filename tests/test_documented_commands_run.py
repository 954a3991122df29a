"""The short commands of README and docs, run as they stand there.

They run in a directory like a checkout after a run of all steps, where the models that the pages
name are tiny directories of those names. Commands that would take long, a network, or a GPU are in
`ELSEWHERE`, with what runs them.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.families import tiny_causal_lm, tiny_config
from tests.pipeline.data.tokenizers import byte_level
from tests.test_documented_commands import FILES, ROOT, lines
from tests.test_end_to_end import SHORT

ELSEWHERE = {
    "make ": "by whoever tests or installs",
    ".venv/bin/python chat.py": "the chat.py below, in another environment",
    "python3 -m venv": "make",
    ". .venv/bin/activate": "make",
    "pip install": "make, and test_package.py",
    "torchrun ": "the same steps, in faults/ and test_resume.py",
    "bash scripts/": "test_configs.py",
    "sbatch ": "pipeline/launch/test_slurm.py, without SLURM itself",
    "python train.py --deployment-type multi_node --hostfile": "faults/test_many_machines.py",
    "python train.py --deployment-type multi_node --node-rank": "faults/test_many_machines.py",
    "python -m pipeline.launch.cluster": "pipeline/launch/test_remote.py",
    "--output-dir out/hand": "faults/test_many_machines.py",
    "--include localhost:0,2": "pipeline/launch/, as two GPUs are needed",
    "--autotune": "pipeline/autotune/",
    "out/autotune/best.yaml": "pipeline/autotune/",
    "stories260k": "a run of an hour, whose figures are in docs/results.md",
    "--sft.model.lora.rank 8": "a run of minutes, whose figures are in docs/results.md",
    "--ppo.advantage": "step3_ppo/, and test_steps_at_every_stage.py",
    "--zero-config ds_config.json": "test_end_to_end.py, in a short form",
    "--lora 16": "test_end_to_end.py, in a short form",
    "python train.py --actor-model facebook/opt-1.3b --reward-model facebook/opt-350m": "Hub",
    "--actor-zero-stage 3": "test_steps_at_every_stage.py",
    "--config my.yaml": "test_train_cli.py",
    "--threads 1": "pipeline/test_compute_threads.py",
    "--save-every": "test_resume.py",
    "... --resume": "test_resume.py",
    "--config guessing-grpo.yaml": "test_environments_end_to_end.py, in a short form",
    "--environment": "test_environments_end_to_end.py, in a short form",
    "--step 1 --deployment-type single_node": "test_end_to_end.py, in a short form",
}
"""Parts of commands that are not run here, and where they are."""

WHOLE_RUNS = {"python train.py", "python train.py --deployment-type single_node"}
"""Minutes each; test_end_to_end.py runs them in a short form."""

MODELS = ("DIR", "BASE", "facebook/opt-125m", "facebook/opt-350m", "facebook/opt-1.3b")
MODELS += ("facebook/opt-13b", "meta-llama/Llama-3.1-70B")


def listed() -> list[str]:
    """Every command, once, as it is written but for the spaces and an ellipsis."""
    return list(dict.fromkeys(" ".join(line.split()) for _, line in lines()))


def is_short(command: str) -> bool:
    """Whether a command is run here."""
    return command not in WHOLE_RUNS and not any(part in command for part in ELSEWHERE)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory like a checkout, with a finished run in OUT."""
    home = tmp_path_factory.mktemp("checkout")
    for name in ("train.py", "chat.py", "configs", "scripts"):
        (home / name).symlink_to(ROOT / name)
    ended = run("python train.py --output-dir OUT " + shlex.join([*SHORT, *SAVED]), home)
    assert ended.returncode == 0, ended.stderr
    for name, text in FILES.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    rows = [
        {"prompt": f"What is {n} + 1?", "chosen": f"It is {n + 1}.", "rejected": "No."}
        for n in range(40)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("my.jsonl", "pairs.jsonl", "IN.jsonl", "FILE"):
        (home / name).write_text(lines)
    tokenizer = byte_level(bos=True)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 2048}
    for name in MODELS:
        tokenizer.save_pretrained(home / name)
        tiny_config("opt", **sizes).save_pretrained(home / name)
    for name in ("DIR", "BASE"):
        tiny_causal_lm("opt", **sizes).save_pretrained(home / name)
    return home


SAVED = ("--save-every", "1")


def run(command: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of a page, in the environment of the tests."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=home,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        input="",
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.grid
@pytest.mark.timeout(900)
def test_short_commands_of_the_docs_run_as_they_stand(checkout: Path) -> None:
    short = [command for command in listed() if is_short(command)]

    failed = []
    for command in short:
        ended = run(command.replace(" ... ", " "), checkout)
        if ended.returncode != 0:
            failed.append(f"{command}: {ended.returncode}\n{ended.stderr[-600:]}")

    assert not failed, "\n".join(failed)
    assert len(short) >= 20, short


def test_what_is_run_elsewhere_is_still_in_the_docs() -> None:
    gone = [part for part in ELSEWHERE if not any(part in command for command in listed())]

    assert gone == []
