"""Every kind of label: training, export for `transformers`, and validation."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from inference.reward_model import load_scorer
from pipeline.data.batches import collate
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Encoded, Example, Message
from pipeline.system.errors import UserError
from step2_reward.config import RewardConfig
from step2_reward.labels import detect_kind, resolve_labels
from step2_reward.train import train
from tests.distributed import run_ranks
from tests.families import save_base
from tests.step2_reward.labeled import make_config, make_rows, train_and_read, write_jsonl
from tests.test_resume import read_metric

KINDS = ("classes", "scalar", "steps")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("kind", KINDS)
def test_each_label_kind_trains_and_exports_a_classifier(
    tmp_path: Path, base: Path, kind: str
) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", make_rows(kind))
    values = {"class_list": ("rude", "curt", "polite"), "class_values": (0.0, 1.0, 4.0)}
    config = make_config(
        tmp_path, data, base, max_steps=15, **(values if kind == "classes" else {})
    )

    train(config)

    figures = json.loads((config.output_dir / "result.json").read_text())["eval"]
    assert figures["labels"] == kind
    assert figures["accuracy_after"] >= 0.99
    losses = read_metric(config, "loss")
    assert losses[-1] < 0.5 * losses[0]
    model = AutoModelForSequenceClassification.from_pretrained(config.output_dir)
    assert model.config.num_labels == (3 if kind == "classes" else 1)
    assert model.config.label_kind == kind
    if kind == "classes":
        assert model.config.id2label == {0: "rude", 1: "curt", 2: "polite"}


def test_class_score_is_the_expected_value_in_transformers(tmp_path: Path, base: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", make_rows("classes"))
    values = (0.0, 1.0, 4.0)
    config = make_config(
        tmp_path, data, base, class_list=("rude", "curt", "polite"), class_values=values
    )
    train(config)
    exported = AutoModelForSequenceClassification.from_pretrained(config.output_dir)
    tokenizer = AutoTokenizer.from_pretrained(config.output_dir)
    prompt, response = (Message("user", "Add 1 and 1."),), (Message("assistant", "Sure! It is 2."),)
    ids = torch.tensor([resolve_format(tokenizer, "auto").encode(prompt, response).input_ids])
    exported.config.pad_token_id = None

    scorer, _ = load_scorer(str(config.output_dir))
    with torch.no_grad():
        score = scorer.final_scores(collate([Encoded.untrained(ids[0].tolist())]))
        expected = exported(ids).logits[0].softmax(dim=0) @ torch.tensor(values)

    assert score.item() == pytest.approx(expected.item(), abs=1e-5)
    assert score.item() > 3


@pytest.mark.jobs
def test_losses_on_two_processes_at_stage_3_match_one_process(tmp_path: Path, base: Path) -> None:
    """With five rows per step the processes never have equally many."""
    data = write_jsonl(tmp_path / "rows.jsonl", make_rows("steps"))
    config = make_config(tmp_path, data, base, labels="steps", batch_size=5, max_steps=3)
    expected = train_and_read(replace(config, output_dir=tmp_path / "alone"))
    config = replace(
        config,
        micro_batch_size=2,
        output_dir=tmp_path / "together",
        model=replace(config.model, zero_stage=3),
    )

    first, second = run_ranks(train_and_read, config)

    assert first == second == pytest.approx(expected, rel=1e-3, abs=1e-5)


def label_rows(*labels: Any) -> list[Example]:
    return [Example((), label=label, origin=f"line {n}") for n, label in enumerate(labels, 1)]


def step_row(*labels: float | None) -> Example:
    return Example((), steps=("step",) * len(labels), step_labels=labels)


TURN = (Message("assistant", "Yes"),)
PAIR = Example((), TURN, TURN)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([PAIR, *label_rows(1)], "pairs"),
        ([PAIR, replace(PAIR, tie=True)], "pairs"),
        ([PAIR, step_row(1.0)], "steps"),
        (label_rows(*range(20)), "classes"),
        (label_rows(*range(21)), "scalar"),
        (label_rows(0.5, 1), "scalar"),
        (label_rows("good", 1), "classes"),
    ],
)
def test_label_kind_is_detected_from_the_rows(rows: list[Example], expected: str) -> None:
    assert detect_kind(RewardConfig(), rows) == expected


@pytest.mark.parametrize(
    ("settings", "rows", "message"),
    [
        ({}, [PAIR], "no held-out row has a chosen and a rejected"),
        ({"labels": "scalar"}, [PAIR], "no training row has a label that is a number"),
        ({"loss": "mse"}, [PAIR, PAIR], "reward.loss mse can't be used with labels of kind pairs"),
        ({}, [PAIR, replace(PAIR, tie=True)], "no held-out row has a chosen and a rejected"),
        ({}, [step_row(1.0, None), step_row(0.0)], "all 1 labeled steps .* are right"),
        ({}, [step_row(0.4, 0.0), step_row(1.0)], "all 2 labeled steps .* are wrong"),
        ({"labels": "scalar"}, label_rows("a", 1), "line 1: label must be a number"),
        ({"labels": "scalar", "loss": "bce"}, label_rows(1.5, 1), "line 1: label is 1.5"),
        ({"labels": "scalar"}, label_rows(2, 2, 3), "all 2 training rows have the label 2"),
        ({}, label_rows("a", "a", "b"), "all 2 training rows have the class a"),
        ({"class_list": ("a", "b")}, label_rows("a", "c"), "line 2: label c is not one of"),
        ({"class_values": (1.0,)}, label_rows("a", "b", "a"), "class_values has 1 numbers, but"),
        ({"margin": True}, [PAIR, replace(PAIR, margin=1.0)], "no training pair has a margin"),
        ({"class_list": ("a", "b")}, [PAIR, PAIR], "class_weights are for classes"),
        ({"center_coef": 0.1}, label_rows("a", "b", "a"), "reward.center_coef is for pairs"),
    ],
)
def test_labels_without_information_are_rejected(
    settings: dict[str, Any], rows: list[Example], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        RewardConfig(**settings).choose_rows(rows[:-1] or rows, rows[-1:] if rows[1:] else [])


def test_classes_are_sorted_and_have_values() -> None:
    rows = label_rows(True, False, True, True)
    labels = resolve_labels(RewardConfig(), rows[:3], rows[3:])
    numbers = resolve_labels(RewardConfig(), label_rows(10, 9, 9), [])
    scalar = resolve_labels(RewardConfig(labels="scalar"), label_rows(1.0, 2.0, 3.0, 6.0), [])

    assert (labels.classes, labels.values) == (("false", "true"), (0.0, 1.0))
    assert (numbers.classes, numbers.values, numbers.num_labels) == (("9", "10"), (9.0, 10.0), 2)
    assert (scalar.mean, scalar.std, scalar.loss) == (3.0, math.sqrt(3.5), "mse")
