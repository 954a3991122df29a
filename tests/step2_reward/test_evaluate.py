"""Evaluation of a reward model on pairs and on single responses."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Message
from pipeline.models.hf.export import export
from pipeline.models.hf.load import load_for_inference
from step2_reward.evaluate import main
from tests.families import export_reward


@pytest.fixture(scope="module")
def actor_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("actor")
    export(*load_for_inference("embedded"), directory)
    return directory


@pytest.fixture(scope="module")
def reward_dir(actor_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a random score head."""
    directory = tmp_path_factory.mktemp("reward")
    export_reward(actor_dir, directory)
    return directory


def transformers_score(directory: Path, prompt: str, answer: str) -> float:
    """Compute the score with `transformers`."""
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    encoded = resolve_format(tokenizer, "auto").encode(
        (Message("user", prompt),), (Message("assistant", answer),)
    )
    return model(torch.tensor([encoded.input_ids])).logits.item()


def test_scores_match_transformers(reward_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = ("Yes, it is.", "No.", "Perhaps; who can say?")

    main(["--path", str(reward_dir), "--prompt", "Is 7 odd?", "--answer", *answers])

    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "Prompt: Is 7 odd?"
    assert [line[11:] for line in lines] == list(answers)
    expected = [transformers_score(reward_dir, "Is 7 odd?", answer) for answer in answers]
    assert [float(line[:9]) for line in lines] == pytest.approx(expected, abs=1e-4)
