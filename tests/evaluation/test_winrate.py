"""`python -m evaluation.winrate`, as a user runs it, on tiny models made on the spot."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation.winrate import WinrateConfig, main, matches
from inference.reward_model import score_responses
from pipeline.data.examples import Example, Message
from rewards.sampling import sample_responses
from tests.families import export_reward, tiny_causal_lm
from tests.pipeline.data.tokenizers import byte_level

SCORE = """
def length(episodes):
    return [None if "0" in e.prompt[-1].content else float(len(e.response)) for e in episodes]

def nothing(episodes):
    return [None for e in episodes]

def broken(episodes):
    raise KeyError("x")
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three random models, a function and prompts."""
    directory = tmp_path_factory.mktemp("models")
    tokenizer = byte_level(bos=True)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 128}
    for seed, name in enumerate("abc"):
        tokenizer.save_pretrained(directory / name)
        tiny_causal_lm("llama", seed=seed, **sizes).save_pretrained(directory / name)
    (directory / "score.py").write_text(SCORE)
    rows = [{"prompt": f"Say {n}"} for n in range(6)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def settings(home: Path, function: str, *models: str) -> dict[str, Any]:
    return {
        "paths": tuple(str(home / name) for name in models),
        "prompts": str(home / "rows.jsonl"),
        "judge": f"{home / 'score.py'}:{function}",
        "max_new_tokens": 12,
        "workers": 1,
    }


def words(given: dict[str, Any], *more: str) -> list[str]:
    options = [["--paths", *given["paths"]]]
    names = ("prompts", "judge", "max_new_tokens", "workers")
    options += [[f"--{name.replace('_', '-')}", str(given[name])] for name in names]
    return [word for option in options for word in option] + list(more)


@pytest.mark.jobs
def test_every_two_models_are_compared_by_what_a_program_gives(
    home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = settings(home, "length", "a", "b", "c")
    out = tmp_path / "winrate.json"

    main(words(given, "--output", str(out)))

    found = json.loads(out.read_text())
    config = WinrateConfig(**given)
    examples = [Example((Message("user", f"Say {n}"),)) for n in range(6)]
    lengths = [
        [len(each.response) for (each,) in sample_responses(path, examples, config)]
        for path in config.paths
    ]
    expected = {
        (ours, theirs): np.mean(
            [
                (a > b) + 0.5 * (a == b)
                for a, b in list(zip(lengths[ours], lengths[theirs], strict=True))[1:]
            ]
        )
        for ours, theirs in ((1, 0), (2, 0), (2, 1))
    }
    assert {
        (config.paths.index(each["model"]), config.paths.index(each["against"])): each["win_rate"]
        for each in found["matches"]
    } == pytest.approx(expected)
    assert [each["unknown"] for each in found["matches"]] == [1, 1, 1]
    printed = capsys.readouterr().out
    assert f"{home / 'b'} against {home / 'a'}" in printed


def test_a_reward_model_prefers_what_it_scores_higher(home: Path) -> None:
    if not (home / "reward").exists():
        export_reward(home / "a", home / "reward")
    judge = json.dumps({"kind": "model", "path": str(home / "reward")})
    config = WinrateConfig(**{**settings(home, "length", "a", "b"), "judge": judge})
    examples = [Example((Message("user", f"Say {n}"),)) for n in range(6)]
    answers = [[each for (each,) in sample_responses(p, examples, config)] for p in config.paths]

    (match,) = matches(answers, config)

    scores = [
        np.array(score_responses(str(home / "reward"), [(e.prompt, e.response) for e in of_model]))
        for of_model in answers
    ]
    assert match.points.tolist() == (scores[1] > scores[0]).astype(float).tolist()
