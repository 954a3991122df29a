"""Imports point one way: train.py, then steps, then inference, then pipeline."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STEPS = {"step1_sft", "step2_reward", "step3_ppo"}
OURS = STEPS | {"inference", "pipeline", "rlhf_pipeline", "train", "chat"}

MAY_IMPORT = {
    "pipeline": {"pipeline"},
    "inference": {"inference", "pipeline"},
    **{step: {step, "inference", "pipeline"} for step in STEPS},
    "chat": {"inference", "pipeline"},
    "train": STEPS | {"inference", "pipeline"},
    "rlhf_pipeline": {"rlhf_pipeline", "train", "inference", "pipeline"},
}


def imported(file: Path) -> Iterator[str]:
    """First words of the modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py")) or [ROOT / f"{package}.py"]
    wrong = {
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in imported(file)
        if name in OURS - MAY_IMPORT[package]
    }

    assert not wrong


def test_no_product_code_imports_the_tests() -> None:
    files = [ROOT / "train.py", ROOT / "chat.py"]
    files += [file for package in MAY_IMPORT for file in (ROOT / package).rglob("*.py")]

    assert not [file for file in files if "tests" in imported(file)]


@pytest.mark.parametrize(
    "module", ["train", "step1_sft.config", "step2_reward.config", "step3_ppo.config"]
)
def test_settings_and_train_import_nothing_heavy(module: str) -> None:
    program = f"import sys, {module}; print(*sys.modules)"

    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()

    assert not {"torch", "transformers", "datasets", "numpy", "peft"} & set(loaded)
