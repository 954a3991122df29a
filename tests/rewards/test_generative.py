"""rewards/generative.py: a language model on disk that judges, in its worker process."""

from pathlib import Path

import pytest
import torch

from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Message
from rewards.config import RewardConfig
from rewards.contract import Episode
from rewards.mixture import Rewards
from tests.families import tiny_causal_lm
from tests.pipeline.data.tokenizers import byte_level

ANSWERS = {"a": 'I think {"score": 2}', "b": '{"score": 8.5}', "c": "no idea"}
"""Trained verdicts of the model about three responses."""


def episode(response: str, slot: int = 0) -> Episode:
    return Episode((Message("user", "Hi"),), response, extra={}, slot=slot)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has learned three answers by heart."""
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("judge")
    tokenizer = byte_level(bos=True)
    model = tiny_causal_lm("llama", vocab_size=len(tokenizer), max_position_embeddings=256)
    chat = resolve_format(tokenizer, "auto")
    (stop, *_) = chat.stop_ids
    rows = []
    for response, answer in ANSWERS.items():
        prompt = chat.encode_prompt([Message("user", f"Grade {response}")])
        ids = [*tokenizer(answer, add_special_tokens=False)["input_ids"], stop]
        rows.append((torch.tensor([[*prompt, *ids]]), len(prompt)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        loss = torch.zeros(())
        for ids, length in rows:
            logits = model(input_ids=ids).logits[0, length - 1 : -1]
            loss = loss + torch.nn.functional.cross_entropy(logits, ids[0, length:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "template.txt").write_text("Grade {response}")
    return directory


def make_config(judge: Path, **settings: object) -> RewardConfig:
    template = str(judge / "template.txt")
    return RewardConfig(
        name="taste", kind="generative", path=str(judge), template=template, **settings
    )


@pytest.mark.jobs
def test_a_model_on_disk_scores_responses_on_its_scale(judge: Path) -> None:
    with Rewards([make_config(judge)], timeout_seconds=60.0) as rewards:
        rewards.submit([episode(response, slot) for slot, response in enumerate("abc")])
        scored = rewards.results()["taste"]

    assert scored.values == [0.2, 0.85, None]
    assert scored.failed[:2] == [None, None]
    assert scored.failed[2] == "the judge's answer has no JSON with a score: no idea"


@pytest.mark.jobs
def test_a_question_that_does_not_fit_the_model_fails_its_response_alone(judge: Path) -> None:
    with Rewards([make_config(judge, concurrency=1)], timeout_seconds=60.0) as rewards:
        rewards.submit([episode("b"), episode("x" * 400, slot=1)])
        scored = rewards.results()["taste"]

    assert scored.values == [0.85, None]
    assert scored.failed[1] is not None
    assert "rewards.taste: the question: the prompt has" in scored.failed[1]
