"""The reward model that scores held-out answers, and the KL of sampled ones."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from evaluation.held_out import Prompt
from inference.engine.requests import Response
from inference.reward_model import score_responses
from pipeline.config import FrozenModelConfig
from pipeline.data.examples import Message
from pipeline.demo.model import build_tokenizer
from pipeline.models.hf.chat import load_chat
from pipeline.models.passes import make_policy
from pipeline.parallel.mesh import current_mesh
from step3_preference.evaluate import HeldOut
from step3_preference.reference import InitialActor
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
    scores, stopped = ([answer[name] for _, answer in answers] for name in ("score", "stopped"))
    assert scores == pytest.approx(score_responses(reward, dialogues, stopped))
    assert scores != pytest.approx(score_responses(reward, dialogues))  # some have no end token
    in_fp32 = FrozenModelConfig(path=str(custom_model), trust_remote_code=True)
    assert scores != pytest.approx(score_responses(in_fp32, dialogues, stopped), rel=1e-6)


def test_kl_is_that_of_the_sampled_distributions_and_prefills_keep_spaces(toy: Path) -> None:
    config = toy_config(toy, temperature=0.5)
    chat, run = load_chat(config.model, config.data), {"total_steps": 1, "seed": 0, "name": "actor"}
    _, passes = make_policy(config.model, chat.tokenizer, config.parallel, current_mesh(), **run)
    initial, engine = InitialActor(passes), passes.engine
    engine.load_masters([1.5 * master for master in engine.masters()])
    prompts = [Prompt((Message("user", "How are you?"), Message("assistant", "I am")), [1, 20, 21])]
    held_out = HeldOut(prompts, chat, lambda: nullcontext(engine.model), initial, config)

    kl = held_out.compute_kl([Response([30, 31], stopped=False)])
    (after_space,) = held_out.score_all([Response([38, 31], stopped=False)])

    model = AutoModelForCausalLM.from_pretrained(config.model.path)
    logprobs = []
    for scale in (1.0, 1.5):
        for param in model.parameters():
            param.data.mul_(scale)
        logits = model(torch.tensor([[1, 20, 21, 30, 31]])).logits[0, 2:4] / 0.5
        logprobs.append(logits.log_softmax(dim=1)[[0, 1], [30, 31]].sum().item())
    assert kl == pytest.approx(logprobs[1] - logprobs[0], rel=1e-4)
    assert after_space.text.startswith(" ")
