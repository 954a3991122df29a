"""Process rewards: rows, step boundaries, loss, first errors, and the score for RL."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from inference.reward_model import load_scorer, score_responses
from pipeline.config import RowColumns
from pipeline.data.batches import collate
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Encoded, Example, Message
from pipeline.data.rows.shapes import read_row
from pipeline.data.rows.sources import Row
from pipeline.demo.model import build_tokenizer
from pipeline.models.forward.scores import separator_ids, step_ends
from pipeline.models.hf.load import load_classifier
from pipeline.system.errors import DataError
from step2_reward.config import RewardConfig
from step2_reward.lab.__main__ import main as measure
from step2_reward.lab.figures import PredictedSteps, first_errors, summarize_steps
from step2_reward.labels import Labels
from step2_reward.objectives import StepObjective
from step2_reward.rows import Row as LabelledRow
from step2_reward.rows import collate_rows, encode_steps
from step2_reward.train import train
from step3_ppo.models import RewardModel
from tests.families import save_base
from tests.step2_reward.labeled import make_config, make_rows, write_jsonl

CPU = torch.device("cpu")


def test_trl_rows_are_parsed_as_steps() -> None:
    trl = {"prompt": "q", "completions": ["a", " ", "b"], "labels": [True, False, None]}
    soft = {"prompt": "q", "steps": ["a"], "labels": [0.25]}

    examples = [
        read_row(Row(columns, "rows.jsonl line 1"), {}, kept=RowColumns(labels=True))
        for columns in (trl, soft)
    ]

    assert [(example.steps, example.step_labels) for example in examples if example] == [
        (("a", "b"), (1.0, None)),
        (("a",), (0.25,)),
    ]
    assert not any(example.chosen or example.rejected for example in examples if example)


def test_labeled_steps_have_equal_weight_in_any_micro_batches() -> None:
    rows = [((1, 2, 3), (1.0, 0.0, 1.0)), ((4,), (0.0,)), ((2, 3), (0.25, 1.0))]
    config = RewardConfig(labels="steps", micro_batch_size=64)
    objective = StepObjective(Labels("steps", "bce"), config)
    encoded = [
        LabelledRow((Encoded([0, *range(i, i + 5)], [False] + [True] * 5),), targets, ends=ends)
        for i, (ends, targets) in zip((1, 6, 11), rows, strict=True)
    ]
    logits = torch.randn(16, 1)  # of each token

    def total_loss(parts: list[list[int]]) -> tuple[Tensor, float]:
        loss, num_correct = torch.zeros(()), 0.0
        for part in parts:
            batch = collate_rows(encoded, part, weight=3 / 6)
            assert batch.tokens.num_tokens == 1 + 5 * (len(part) or 1)  # the first is shared
            outputs = logits[batch.tokens.input_ids]
            partial_loss, hits = objective.loss(outputs[batch.positions], batch)
            loss, num_correct = loss + partial_loss / 3, num_correct + hits.item() / 3
        return loss, num_correct

    flat = torch.tensor(
        [logits[5 * row + end] for row, (ends, _) in enumerate(rows) for end in ends]
    )
    targets = torch.tensor([target for _, row_targets in rows for target in row_targets])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(flat, targets)
    for parts in ([[0, 1, 2]], [[2], [1, 0]], [[1], [], [0], [2]]):
        loss, accuracy = total_loss(parts)
        torch.testing.assert_close(loss, expected)
        assert accuracy == pytest.approx(((flat > 0) == (targets >= 0.5)).float().mean().item())


def test_inseparable_steps_are_rejected() -> None:
    chat = resolve_format(build_tokenizer(), "human_assistant")
    config = RewardConfig(labels="steps", step_separator="no token ends so")
    question, steps = (Message("user", "q"),), ("2\n+ 2\n= 4", "so 4")
    example = Example(question, steps=steps, step_labels=(1.0, 0.0), origin="line 3")

    with pytest.raises(DataError, match="has no token that ends in 'no token ends so'"):
        StepObjective(Labels("steps", "bce"), config).separators(chat)
    separators = frozenset(separator_ids(chat.tokenizer, "\n"))
    with pytest.raises(DataError, match="line 3: 2 steps joined by ' ' become 3 when"):
        encode_steps(example, chat, " ", separators, max_length=99)


def test_first_errors_match_hand_computed_values() -> None:
    rows = [
        PredictedSteps((1.0, 0.0, 0.0), (2.0, -1.0, 3.0)),  # the error is found
        PredictedSteps((1.0, 0.0), (-1.0, -1.0)),  # predicted too early
        PredictedSteps((0.0,), (0.5,)),  # missed
        PredictedSteps((1.0, 1.0), (1.0, 2.0)),  # correctly without error
        PredictedSteps((1.0,), (-2.0,)),  # false alarm
        PredictedSteps((), ()),  # all steps were truncated
    ]

    errors, figures = first_errors(rows), summarize_steps(rows)

    counts = {"with_error": 3, "found": 1, "without_error": 2, "kept": 1}
    assert {name: errors[name] for name in counts} == counts
    assert errors["accuracy"] == 2 / 5
    assert errors["f1"] == pytest.approx(2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2))
    # Correct steps: 2, -1, 1, 2, -2; wrong ones: -1, 3, -1, .5.
    assert figures["accuracy"] == pytest.approx(5 / 9)
    assert figures["macro_recall"] == pytest.approx((3 / 5 + 2 / 4) / 2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RewardConfig:
    """A model that was trained to separate polite steps from rude ones."""
    directory = tmp_path_factory.mktemp("steps")
    base = save_base(directory / "base")
    data = write_jsonl(directory / "rows.jsonl", make_rows("steps"))
    config = make_config(directory, data, base, max_steps=15)
    train(config)
    return config


def test_response_score_is_min_last_or_product_of_steps(trained: RewardConfig) -> None:
    path = str(trained.output_dir)
    scorer, chat = load_scorer(path)
    prompt = (Message("user", "Add 2 and 1."),)
    response = "Sure! It is 3.\nGo away. It is 3.\nIt is 3."
    row = chat.encode(prompt, (Message("assistant", response),))
    batch = collate([row, row.head(len(row) - 1)])
    separators = separator_ids(build_tokenizer(), "\n")
    first, second = step_ends(batch, separators)
    with torch.no_grad():
        logits = scorer(batch)
    model = AutoModelForSequenceClassification.from_pretrained(path)
    assert (model.config.label_kind, model.config.step_separator) == ("steps", "\n")
    assert model.config.step_token_ids == separators
    with torch.no_grad():
        expected_logit = model(torch.tensor([row.input_ids[: first[1] + 1]])).logits[0, 0]
    torch.testing.assert_close(expected_logit, logits[first[1]], rtol=1e-4, atol=1e-4)
    assert len(first) == len(second) == 3
    empty = Encoded([4, 9, 5, 9, 9, 6], [False] + [True] * 5)  # 9 is the separator
    assert step_ends(collate([empty]), {9}) == [[3]]
    assert logits[first[1]] < 0 < logits[first[0]]

    for mode, expected in {
        "min": logits[first].min(),
        "last": logits[first[-1]],
        "product": logits[first].sigmoid().log().sum(),
    }.items():
        model.config.step_score = scorer.model.config.step_score = mode
        reward_model = RewardModel(load_classifier(trained.model, device=CPU), trained.model)
        with torch.no_grad():
            scores = scorer.final_scores(batch)
        torch.testing.assert_close(scores[0], expected)
        reward_model.hf_config = model.config
        reward_model.engine.model.load_state_dict(scorer.state_dict())
        torch.testing.assert_close(reward_model.scores([batch])[0][0], expected)
    assert score_responses(path, [(prompt, response)]) == pytest.approx([logits[first[1]].item()])


def test_lab_measures_steps_and_first_errors(
    trained: RewardConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(trained.data.path[0])
    measure(["--path", str(trained.output_dir), "--data-path", data, "--output-dir", str(tmp_path)])

    figures = json.loads((tmp_path / "lab.json").read_text())
    lines = list(map(json.loads, (tmp_path / "predictions.jsonl").read_text().splitlines()))
    assert figures["labels"] == "steps"
    assert figures["step_accuracy"]["value"] == 1.0
    assert figures["step_accuracy"]["count"] == sum(len(line["steps"]) for line in lines) == 128
    assert figures["first_errors"]["with_error"] == figures["first_errors"]["found"] == 32
    assert figures["first_errors"]["f1"] == 1.0
    rude = next(line for line in lines if "Go away" in line["steps"][1])
    assert rude["probabilities"][1] < 0.5 < rude["probabilities"][0]
    printed = capsys.readouterr().out
    assert "100.0% of 128 steps are predicted correctly" in printed
    assert "The first error is found in 100.0% of 32 responses with an error" in printed
    assert "not clearly better" not in printed
