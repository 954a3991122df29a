"""Python code in a model directory is not executed by default."""

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

class CustomConfig(LlamaConfig):
    model_type = "custom"

class CustomModel(LlamaForCausalLM):
    config_class = CustomConfig
"""


@pytest.fixture
def model_with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A directory with a model whose classes are in a file next to its weights."""
    path = save_to(tiny_causal_lm("llama"), tmp_path / "model")
    byte_level().save_pretrained(path)
    config = Path(path) / "config.json"
    settings = json.loads(config.read_text())
    classes = {"AutoConfig": "custom.CustomConfig", "AutoModelForCausalLM": "custom.CustomModel"}
    config.write_text(json.dumps({**settings, "model_type": "custom", "auto_map": classes}))
    (Path(path) / "custom.py").write_text(CODE)
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    return path


def test_model_with_code_raises_without_running_it(model_with_code: str) -> None:
    message = (
        f"{model_with_code} contains Python code that loading would execute; review the code, and"
        " set trust_remote_code to true for this model if you trust it"
    )
    with pytest.raises(ModelError, match=f"^{re.escape(message)}$"):
        load_causal_lm(FrozenModelConfig(path=model_with_code), device=torch.device("cpu"))
    with pytest.raises(ModelError, match=f"^{re.escape(message)}$"):
        check_model_directory(model_with_code)  # as a plan does

    assert not Path(os.environ["RAN"]).exists()
