"""The reward model that judges held-out answers is loaded as its settings say."""

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

class OwnModel(LlamaForSequenceClassification):
    pass
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reward model whose classes are in a file next to its weights."""
    tokenizer, path = build_tokenizer(), tmp_path / "reward"
    model = tiny_classifier("llama", vocab_size=len(tokenizer))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    settings = json.loads((path / "config.json").read_text())
    settings["auto_map"] = {"AutoModelForSequenceClassification": "own.OwnModel"}
    (path / "config.json").write_text(json.dumps(settings))
    (path / "own.py").write_text(CODE)
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    return path


def test_answers_are_scored_in_the_precision_and_by_the_code_that_are_set(
    foreign: Path, toy: Path, tmp_path: Path
) -> None:
    reward = FrozenModelConfig(path=str(foreign), precision="bf16", trust_remote_code=True)
    train(toy_config(toy, output_dir=tmp_path / "out", max_steps=1, reward=reward))

    assert (tmp_path / "ran").exists()
    samples = json.loads((tmp_path / "out" / "samples.json").read_text())["rows"]
    answers = [
        (each["prompt"][0]["content"], answer)
        for each in samples
        for answer in each["answers"].values()
    ]
    dialogues = [((Message("user", prompt),), answer["text"]) for prompt, answer in answers]
    scores = [answer["score"] for _, answer in answers]
    assert scores == pytest.approx(score_responses(reward, dialogues))
    in_fp32 = FrozenModelConfig(path=str(foreign), trust_remote_code=True)
    assert scores != pytest.approx(score_responses(in_fp32, dialogues), rel=1e-6)
