"""The program of docs/engine.md trains as a plain PyTorch loop does."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.system.errors import CheckpointError, ConfigError
from rlhf_pipeline import Engine
from tests.commands import ROOT, run_concurrently
from tests.families import save_base
from tests.pipeline.data.tokenizers import byte_level

PAGE = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
LINES = [f"{number} plus {number} is {2 * number}" for number in range(7)]
STEPS = 7


@pytest.fixture(scope="module")
def program_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's program, a model and a text file."""
    directory = tmp_path_factory.mktemp("home")
    (program,) = re.findall(r"```python\n# finetune\.py.*?\n(.*?)```", PAGE, re.DOTALL)
    (directory / "finetune.py").write_text(program)
    (directory / "texts.txt").write_text("\n".join(LINES))
    save_base(directory / "model", tokenizer=byte_level(bos=True))
    return directory


def run_finetune(program_dir: Path, out: str, *, stage: int, steps: int) -> str:
    """Return the standard output of the program on two processes."""
    command = ("finetune.py", "model", "texts.txt", out, str(stage), str(steps))
    first, second = run_concurrently([command] * 2, cwd=program_dir, as_job=True)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    return first.stdout + second.stdout


def train_with_pytorch(program_dir: Path) -> dict[str, Tensor]:
    """Return the weights after AdamW on two lines per step, without decay of vectors."""
    tokenizer = AutoTokenizer.from_pretrained(program_dir / "model")
    model = AutoModelForCausalLM.from_pretrained(program_dir / "model")
    matrices = [param for param in model.parameters() if param.ndim > 1]
    vectors = [param for param in model.parameters() if param.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(STEPS):
        for line in (LINES[2 * step % 7], LINES[(2 * step + 1) % 7]):
            tokens = tokenizer(line, return_tensors="pt").input_ids
            (model(input_ids=tokens, labels=tokens).loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.jobs
def test_documented_program_matches_pytorch_and_resumes_at_another_stage(program_dir: Path) -> None:
    assert "step 5 loss" in run_finetune(program_dir, "out", stage=0, steps=5)
    assert run_finetune(program_dir, "out", stage=3, steps=STEPS).startswith("step 6 loss")

    trained = load_file(program_dir / "out" / "model.safetensors")
    for name, weight in train_with_pytorch(program_dir).items():
        torch.testing.assert_close(trained[name], weight, rtol=0, atol=2e-6, msg=name)


def train_step(engine: Engine) -> None:
    engine.backward(engine(torch.ones(1, 16)).square().mean())
    engine.step()


def test_checkpoint_restores_weights_moments_progress_and_random_state(tmp_path: Path) -> None:
    engine, resumed = (Engine(torch.nn.Linear(16, 16), optim={"lr": 0.1}) for _ in range(2))
    train_step(engine)
    assert engine.resume(tmp_path / "new") is None
    engine.save(tmp_path, {"epoch": 3})
    expected = torch.rand(1)
    train_step(engine)

    assert resumed.resume(tmp_path) == {"epoch": 3}
    assert torch.rand(1) == expected
    train_step(resumed)
    assert torch.equal(*(engine.model.state_dict()["weight"] for engine in (resumed, engine)))


def test_checkpoint_restores_frozen_weights(tmp_path: Path) -> None:
    def make_engine() -> Engine:
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
        model[0].requires_grad_(False)
        return Engine(model)

    first, second = make_engine(), make_engine()
    for directory in ("a", "b", "a"):
        first.save(tmp_path / directory)
    second.resume(tmp_path / "a")
    assert torch.equal(*(engine.model.state_dict()["0.weight"] for engine in (first, second)))


def test_checkpoint_of_another_model_is_rejected(tmp_path: Path) -> None:
    Engine(torch.nn.Linear(16, 16)).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"trained parameter bias of shape \[16\]"):
        Engine(torch.nn.Linear(8, 8)).resume(tmp_path)


def test_engine_settings_are_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"optim\.lrr in Engine.*did you mean optim\.lr"):
        Engine(torch.nn.Linear(2, 2), optim={"lrr": 1})
    with pytest.raises(ConfigError, match="needs total_steps"):
        Engine(torch.nn.Linear(2, 2), optim={"schedule": "cosine"})
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes, which have not joined"):
        Engine(torch.nn.Linear(2, 2))
