"""Python code that comes with a model runs where the user allows it, and nowhere else."""

import json
import os
import re
from pathlib import Path

import pytest
import torch

from pipeline.config import FrozenModelConfig
from pipeline.models.hf.directory import check_model_directory
from pipeline.models.hf.load import load_causal_lm
from pipeline.system.errors import ModelError
from tests.families import save_to, tiny_causal_lm
from tests.pipeline.data.tokenizers import byte_level

CODE = """
import os
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path(os.environ["RAN"]).write_text("ran")

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A directory with a model whose classes are in a file next to its weights."""
    path = save_to(tiny_causal_lm("llama"), tmp_path / "model")
    byte_level().save_pretrained(path)
    config = Path(path) / "config.json"
    settings = json.loads(config.read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config.write_text(json.dumps({**settings, "model_type": "own", "auto_map": own}))
    (Path(path) / "own.py").write_text(CODE)
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    return path


def has_run() -> bool:
    return Path(os.environ["RAN"]).exists()


def test_code_of_a_model_is_refused_in_one_sentence(foreign: str) -> None:
    sentence = (
        f"{foreign} contains Python code that loading would execute; review the code, and set"
        " trust_remote_code true for this model if you trust it"
    )
    with pytest.raises(ModelError, match=f"^{re.escape(sentence)}$"):
        load_causal_lm(FrozenModelConfig(path=foreign), device=torch.device("cpu"))
    with pytest.raises(ModelError, match=f"^{re.escape(sentence)}$"):
        check_model_directory(foreign)  # as a plan does, for every step's models

    assert not has_run()
