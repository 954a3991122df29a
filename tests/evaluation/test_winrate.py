"""`python -m evaluation.winrate` as a user runs it, on tiny random models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation.winrate import WinrateConfig, compare_models, main
from inference.reward_model import score_responses
from pipeline.data.examples import Example, Message
from pipeline.models.hf.chat import check_ready
from pipeline.system.errors import ModelError
from rewards.sampling import sample_responses
from tests.families import export_reward, save_base
from tests.pipeline.data.tokenizers import byte_level

SCORE = """
def length(episodes):
    return [None if "0" in e.prompt[-1].content else float(len(e.response)) for e in episodes]
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three random models, a function and prompts."""
    directory = tmp_path_factory.mktemp("models")
    common = {"tokenizer": byte_level(bos=True), "max_position_embeddings": 128}
    for seed, name in enumerate("abc"):
        save_base(directory / name, seed=seed, **common)
    (directory / "score.py").write_text(SCORE)
    rows = [{"prompt": f"Say {n}"} for n in range(6)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def settings(inputs: Path, function: str, *models: str) -> dict[str, Any]:
    return {
        "paths": tuple(str(inputs / name) for name in models),
        "prompts": str(inputs / "rows.jsonl"),
        "judge": f"{inputs / 'score.py'}:{function}",
        "max_new_tokens": 12,
        "workers": 1,
    }


def make_args(settings: dict[str, Any], *others: str) -> list[str]:
    options = [["--paths", *settings["paths"]]]
    names = ("prompts", "judge", "max_new_tokens", "workers")
    options += [[f"--{name.replace('_', '-')}", str(settings[name])] for name in names]
    return [word for option in options for word in option] + list(others)


@pytest.mark.jobs
def test_every_pair_of_models_is_compared_by_a_program(
    inputs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = settings(inputs, "length", "a", "b", "c")
    out = tmp_path / "winrate.json"

    main(make_args(options, "--output", str(out)))

    results = json.loads(out.read_text())
    config = WinrateConfig(**options)
    examples = [Example((Message("user", f"Say {n}"),)) for n in range(6)]
    lengths = [
        [len(episode.response) for (episode,) in sample_responses(path, examples, config)]
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
        (config.paths.index(row["model"]), config.paths.index(row["against"])): row["win_rate"]
        for row in results["matches"]
    } == pytest.approx(expected)
    assert [row["unknown"] for row in results["matches"]] == [1, 1, 1]
    printed = capsys.readouterr().out
    assert f"{inputs / 'b'} against {inputs / 'a'}" in printed


def test_reward_model_judge_prefers_higher_scores(inputs: Path) -> None:
    if not (inputs / "reward").exists():
        export_reward(inputs / "a", inputs / "reward")
    judge = json.dumps({"kind": "model", "path": str(inputs / "reward")})
    config = WinrateConfig(**{**settings(inputs, "length", "a", "b"), "judge": judge})
    examples = [Example((Message("user", f"Say {n}"),)) for n in range(6)]
    responses = [
        [episode for (episode,) in sample_responses(p, examples, config)] for p in config.paths
    ]

    (match,) = compare_models(responses, config)

    with pytest.raises(ModelError, match="can't generate text"):  # before any model responds
        check_ready(str(inputs / "reward"))
    scores = []
    for run in responses:
        dialogues, stopped = [(e.prompt, e.response) for e in run], [e.stopped for e in run]
        scores.append(np.array(score_responses(str(inputs / "reward"), dialogues, stopped)))
    assert match.points.tolist() == (scores[1] > scores[0]).astype(float).tolist()
