"""rewards/select.py: the best responses as training data."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference.reward_model import score_responses
from pipeline.config import RowColumns
from pipeline.data.examples import Example, Message
from pipeline.data.rows.reading import read_paths
from rewards.select import Candidate, best_and_worst, main
from tests.families import export_reward, save_base
from tests.pipeline.data.tokenizers import byte_level


def candidates(*rewards: float | None) -> list[Candidate]:
    return [Candidate(f"answer {number}", reward) for number, reward in enumerate(rewards)]


def test_first_of_the_best_is_chosen_and_missing_rewards_are_ignored() -> None:
    best, worst = best_and_worst(candidates(None, -2.0, -1.0, -1.0))

    assert (best, worst) == (Candidate("answer 2", -1.0), Candidate("answer 1", -2.0))
    assert best_and_worst(candidates(None, None)) == (None, None)
    truncated, *others = candidates(3.0, 1.0, 1.0)
    assert best_and_worst([replace(truncated, stopped=False), *others]) == (others[0], None)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file of prompts, and the directory of a tiny model."""
    dialogue = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    rows = [{"prompt": f"What is {n}?", "answer": str(n)} for n in range(3)]
    save_base(tmp_path / "model", tokenizer=byte_level(bos=True), max_position_embeddings=256)
    path = tmp_path / "prompts.jsonl"
    text = "".join(json.dumps(row) + "\n" for row in (*rows, {"messages": dialogue}))
    path.write_text(text)
    return path


HOT = ("--temperature", "50", "--best-of", "12", "--max-new-tokens", "48", "--workers", "1")
"""Nearly uniform sampling, so that some responses end early."""

SHORT = "{kind: length, max_tokens: 0, buffer_tokens: 48}"


def run_select(prompts: Path, *arguments: str) -> list[dict[str, Any]]:
    out, model = prompts.with_name("selected.jsonl"), prompts.with_name("model")
    main([*HOT, "--path", str(model), "--prompts", str(prompts), "--output", str(out), *arguments])
    return [json.loads(line) for line in out.read_text().splitlines()]


def read_rows(step: int, path: Path) -> list[Example]:
    """Read the rows as training step `step` does."""
    (rows,) = read_paths((str(path),), {}, RowColumns(), step=step, notes=[])
    return rows.train


def test_demonstrations_are_the_best_responses_readable_by_step_1(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run_select(prompts, "--reward", SHORT)

    assert all(-1 <= row["reward"] < 0 for row in rows)
    assert [turn["role"] for turn in rows[-1]["messages"]][-1] == "assistant"
    printed = capsys.readouterr().out
    assert f"chosen      {len(rows)} demonstrations" in printed
    assert "at most log 12 - 11/12 = 1.568 nats\n" in printed
    assert len(rows) == 4
    examples = read_rows(1, prompts.with_name("selected.jsonl"))
    assert [example.chosen[-1].content for example in examples] == [
        row["messages"][-1]["content"] for row in rows
    ]


def test_pairs_are_the_best_and_worst_responses_readable_by_step_2(prompts: Path) -> None:
    rows = run_select(prompts, "--reward", SHORT, "--write", "pairs")

    assert rows
    assert all(row["reward_chosen"] > row["reward_rejected"] for row in rows)
    examples = read_rows(2, prompts.with_name("selected.jsonl"))
    assert [(e.chosen[-1].content, e.rejected[-1].content) for e in examples] == [
        (row["chosen"][-1]["content"], row["rejected"][-1]["content"]) for row in rows
    ]
    assert {example.margin for example in examples} == {None}


def test_reward_model_scores_equal_score_responses(prompts: Path, tmp_path: Path) -> None:
    reward_model = tmp_path / "reward"
    export_reward(tmp_path / "model", reward_model)
    source = json.dumps({"kind": "model", "path": str(reward_model), "weight": 2.0})

    rows = run_select(prompts, "--reward", source)

    for row in rows:
        prompt = [Message(turn["role"], turn["content"]) for turn in row["messages"][:-1]]
        (score,) = score_responses(str(reward_model), [(prompt, row["messages"][-1]["content"])])
        assert row["reward"] == pytest.approx(2 * score, abs=1e-5)
