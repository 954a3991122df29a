"""Evaluation of a reward model on pairs and on single responses."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Message
from pipeline.models.export import export
from pipeline.models.load import load_for_inference, load_reward_for_inference
from pipeline.models.reward_model import load_scorer
from step2_reward.config import RewardConfig
from step2_reward.evaluate import main, score_answers


@pytest.fixture(scope="module")
def actor_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("actor")
    export(*load_for_inference("embedded"), directory)
    return directory


@pytest.fixture(scope="module")
def reward_dir(actor_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a random score head."""
    directory = tmp_path_factory.mktemp("reward")
    export(*load_reward_for_inference(actor_dir), directory)
    return directory


def plain_score(directory: Path, prompt: str, answer: str) -> float:
    """The score as plain `transformers` computes it."""
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    encoded = resolve_format(tokenizer, "auto").encode(
        (Message("user", prompt),), (Message("assistant", answer),)
    )
    return model(torch.tensor([encoded.input_ids])).logits.item()


def test_scores_are_those_of_plain_transformers(reward_dir: Path) -> None:
    scorer, chat = load_scorer(str(reward_dir))
    answers = ("Yes, it is.", "No.", "Perhaps; who can say?")

    scores = score_answers(scorer, chat, "Is 7 odd?", answers, RewardConfig())

    expected = [plain_score(reward_dir, "Is 7 odd?", answer) for answer in answers]
    assert scores == pytest.approx(expected, abs=1e-5)


def test_pairs_get_the_accuracy_and_the_means_of_their_scores(
    reward_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": "Is 7 odd?", "chosen": "Yes.", "rejected": "Go away."},
        {"prompt": "Say hello.", "chosen": "Hello!", "rejected": "Why?"},
        {"prompt": "Left out", "chosen": "by", "rejected": "--pairs"},
    ]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    main(["--path", str(reward_dir), "--data-path", str(data), "--pairs", "2"])

    chosen, rejected = (
        [plain_score(reward_dir, row["prompt"], row[kind]) for row in rows[:2]]
        for kind in ("chosen", "rejected")
    )
    right = sum(good > bad for good, bad in zip(chosen, rejected, strict=True))
    figures = {
        line[:15].strip(): float(line[15:].rstrip(" %"))
        for line in capsys.readouterr().out.splitlines()
    }
    assert figures["pairs"] == 2
    assert figures["accuracy"] == 100 * right / 2
    assert figures["mean chosen"] == pytest.approx(sum(chosen) / 2, abs=1e-4)
    assert figures["mean rejected"] == pytest.approx(sum(rejected) / 2, abs=1e-4)
