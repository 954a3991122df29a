"""The reward model that scores held-out answers is loaded with its settings."""

import json
from pathlib import Path

import pytest

from inference.reward_model import score_responses
from pipeline.config import FrozenModelConfig
from pipeline.data.examples import Message
from pipeline.demo.model import build_tokenizer
from step3_preference.train import train
from tests.families import tiny_classifier
from tests.step3_preference.toy import toy_config

CODE = """
import os
from pathlib import Path
from transformers import LlamaForSequenceClassification

Path(os.environ["RAN"]).write_text("ran")

class CustomModel(LlamaForSequenceClassification):
    pass
"""


@pytest.fixture
def custom_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reward model with custom code next to its weights."""
    tokenizer, path = build_tokenizer(), tmp_path / "reward"
    model = tiny_classifier("llama", vocab_size=len(tokenizer))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    settings = json.loads((path / "config.json").read_text())
    settings["auto_map"] = {"AutoModelForSequenceClassification": "own.CustomModel"}
    (path / "config.json").write_text(json.dumps(settings))
    (path / "own.py").write_text(CODE)
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    return path


def test_answers_are_scored_with_the_configured_precision_and_code(
    custom_model: Path, toy: Path, tmp_path: Path
) -> None:
    reward = FrozenModelConfig(path=str(custom_model), precision="bf16", trust_remote_code=True)
    train(toy_config(toy, output_dir=tmp_path / "out", max_steps=1, reward=reward))

    assert (tmp_path / "ran").exists()
    samples = json.loads((tmp_path / "out" / "samples.json").read_text())["rows"]
    answers = [
        (row["prompt"][0]["content"], answer)
        for row in samples
        for answer in row["answers"].values()
    ]
    dialogues = [((Message("user", prompt),), answer["text"]) for prompt, answer in answers]
    scores = [answer["score"] for _, answer in answers]
    assert scores == pytest.approx(score_responses(reward, dialogues))
    in_fp32 = FrozenModelConfig(path=str(custom_model), trust_remote_code=True)
    assert scores != pytest.approx(score_responses(in_fp32, dialogues), rel=1e-6)
