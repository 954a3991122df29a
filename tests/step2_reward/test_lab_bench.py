"""RewardBench 2: its scores by hand, its rows, and the command on a model that was trained."""

import json
from dataclasses import replace
from math import tanh
from pathlib import Path
from typing import Any

import pytest

from step2_reward.lab.__main__ import main
from step2_reward.lab.bench import BenchRow, PromptScores, bench_figures, read_bench, ties_score
from step2_reward.train import train
from tests.step2_reward.labelled import POLITE, RUDE, make_rows, save_base, task, write_jsonl


def row(subset: str = "Math", **changes: Any) -> dict[str, Any]:
    """A row as allenai/reward-bench-2 has them."""
    found = {
        "id": "7",
        "prompt": "Add 1 and 1.",
        "chosen": ["2"],
        "rejected": ["3", "4", "5"],
        "num_correct": 1,
        "num_incorrect": 3,
        "total_completions": 4,
        "models": ["a", "b", "c", "d"],
        "subset": subset,
    }
    return {**found, **changes}


def tie(name: str, chosen: list[str], rejected: list[str], **changes: Any) -> dict[str, Any]:
    return row("Ties", id=name, chosen=chosen, rejected=rejected, **changes)


@pytest.mark.parametrize(
    ("correct", "wrong", "point"),
    [
        ([2.0], [1.0, 0.0, -1.0], 1.0),
        ([1.0], [2.0, 0.0, -1.0], 0.0),
        ([1.0], [1.0, 0.0, -1.0], 1 / 2),
        ([1.0], [1.0, 1.0, -1.0], 1 / 3),
        ([1.0], [1.0, 1.0, 1.0], 1 / 4),
        ([0.0], [1.0, 1.0, 0.0], 0.0),
        ([1.0, 1.0], [1.0, 0.0], 2 / 3),
    ],
)
def test_responses_tied_at_the_top_share_the_point(
    correct: list[float], wrong: list[float], point: float
) -> None:
    assert PromptScores(correct, wrong).point == point


def test_the_score_of_ties_is_that_of_the_paper() -> None:
    ref = {
        0: PromptScores([2.0], [0.0, 1.0]),  # gap 1
        1: PromptScores([0.0], [1.0]),  # gap -1
        2: PromptScores([1.0], [0.0]),  # without a like one: counts for accuracy alone
    }
    tied = {
        0: PromptScores([3.0, 2.5], [0.5]),  # gap 2, spread .5
        1: PromptScores([4.0, 3.0], [2.5, 0.0]),  # gap .5, spread 1
    }

    found = ties_score(ref, tied)

    assert found.tied_accuracy == 1.0
    assert found.ref_accuracy == 2 / 3
    assert found.preferred == 0.5  # 2 > .5, but .5 < 1
    assert found.preferred_hard == 0.5  # min(1, 2) > .5, but min(-1, .5) < 1
    assert found.margin == pytest.approx((tanh(1 / 0.5 - 1) + tanh(-1 / 1 - 1)) / 2)
    assert found.score == pytest.approx(0.3 + 0.2 + 0.1 + 0.1 + 0.01 * found.margin)


def test_the_whole_is_the_mean_of_the_subsets_however_many_rows_they_have() -> None:
    rows = [
        *(BenchRow("", "Math", (), ("", "", "", ""), 1) for _ in range(3)),
        BenchRow("", "Focus", (), ("", "", "", ""), 1),
        BenchRow("", "Ties", (), ("", ""), 1, "ref", 0),
        BenchRow("", "Ties", (), ("", "", ""), 2, "tied", 0),
    ]
    right, wrong = PromptScores([1.0], [0.0, 0.0, 0.0]), PromptScores([0.0], [1.0, 0.0, 0.0])
    ties = [PromptScores([1.0], [0.0]), PromptScores([1.0, 1.0], [0.0])]

    found: Any = bench_figures(rows, [right, right, wrong, wrong, *ties])

    assert [each["name"] for each in found["subsets"]] == ["Math", "Focus", "Ties"]
    assert [each["value"] for each in found["subsets"]] == pytest.approx([2 / 3, 0.0, 1.01])
    assert [each.get("chance") for each in found["subsets"]] == [0.25, 0.25, None]
    assert found["value"] == pytest.approx((2 / 3 + 0 + 1.01) / 3)


def test_rows_are_read_as_they_stand(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Add 1 and 1."},
    ]
    data = write_jsonl(
        tmp_path / "rows.jsonl",
        [
            row(prompt="Human: a text\n\nAssistant: of its own", chosen=[" 2\n"]),
            row(prompt=turns),
            tie("ref:3", ["2"], ["3"]),
            tie("tied:3", ["2", "3"], ["4"]),
        ],
    )

    plain, dialogue, ref, tied = read_bench(str(data))

    assert [turn.content for turn in plain.prompt] == ["Human: a text\n\nAssistant: of its own"]
    assert plain.responses == (" 2\n", "3", "4", "5")
    assert [turn.role for turn in dialogue.prompt] == ["user", "assistant", "user"]
    asked = read_bench(str(data), history="user")[1].prompt
    assert [turn.content for turn in asked] == ["Hello.\n\nAdd 1 and 1."]
    assert (ref.kind, ref.number, ref.num_correct) == ("ref", 3, 1)
    assert (tied.kind, tied.number, tied.num_correct) == ("tied", 3, 2)


def test_the_command_scores_a_trained_model_by_subset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    polite, rude = ([text.format(n) for n in range(3)] for text in (POLITE, RUDE))
    pairs = write_jsonl(tmp_path / "pairs.jsonl", make_rows("pairs"))
    config = task(tmp_path, pairs, save_base(tmp_path / "base"))
    train(replace(config, output_dir=tmp_path / "step2_reward"))
    bench = write_jsonl(
        tmp_path / "bench.jsonl",
        [
            *(row("Manners", chosen=polite[:1], rejected=rude) for _ in range(2)),
            row("Upside down", chosen=rude[:1], rejected=polite),
            tie("ref:0", polite[:1], rude),
            tie("tied:0", polite, rude),
        ],
    )

    main(["--path", str(tmp_path / "step2_reward"), "--bench", str(bench), "--max-length", "40"])

    directory = tmp_path / "step2_reward" / "lab"
    found = json.loads((directory / "lab.json").read_text())
    manners, upside_down, ties = found["bench"]["subsets"]
    assert (manners["value"], manners["rows"], manners["chance"]) == (1.0, 2, 0.25)
    assert (upside_down["value"], upside_down["low"]) == (0.0, 0.0)
    assert ties["parts"]["tied_accuracy"] == ties["parts"]["ref_accuracy"] == 1.0
    assert found["bench"]["value"] == pytest.approx((1.0 + 0.0 + ties["value"]) / 3)
    lines = list(map(json.loads, (directory / "predictions.jsonl").read_text().splitlines()))
    assert [line.get("point") for line in lines] == [1.0, 1.0, 0.0, None, None]
    assert [len(line["scores"]) for line in lines] == [4, 4, 4, 4, 6]
    *best, ref, tied = [
        PromptScores(line["scores"][:k], line["scores"][k:])
        for line, k in zip(lines, (1, 1, 1, 1, 3), strict=True)
    ]
    assert min(one.gap for one in best[:2]) > 0 > best[2].gap
    assert ties["value"] == ties_score({0: ref}, {0: tied}).score
    printed = capsys.readouterr().out
    assert printed.startswith(
        f"RewardBench 2: {100 * found['bench']['value']:.1f} %, the mean of 3"
    )
    assert "Manners: 100.0 % on 2 prompts" in printed
    assert "where a random score has 25.0 %" in printed
    assert "Not told apart from a random score: Upside down" in printed
    page = (directory / "report.html").read_text()
    assert "RewardBench 2" in page
    assert "Upside down" in page
