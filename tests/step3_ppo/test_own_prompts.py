"""Step 3 can be evaluated on a user's own prompts without responses."""

import json
from dataclasses import replace
from pathlib import Path

from step3_ppo.train import train
from tests.step3_ppo.toy import toy_config


def test_evaluation_prompts_are_answered_and_not_trained_on(toy: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"and {n}?"}) + "\n" for n in range(30)))
    eval_file = tmp_path / "own.jsonl"
    questions = ["and 3?", "what is a cow", "the capital of Peru"]
    eval_file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in questions))
    config = toy_config(toy, max_steps=1, max_prompt_length=40, output_dir=tmp_path / "out")
    data = replace(
        config.data, path=(str(rows),), split=(0.0, 0.0, 1.0), eval_path=(str(eval_file),)
    )

    train(replace(config, data=data))

    samples = json.loads((config.output_dir / "samples.json").read_text())["rows"]
    assert sorted(row["prompt"][0]["content"] for row in samples) == sorted(questions)
    lines = map(json.loads, (config.output_dir / "metrics.jsonl").read_text().splitlines())
    assert any("eval_objective" in line for line in lines)
    result = json.loads((config.output_dir / "result.json").read_text())["eval"]
    assert result["prompts"] == 3
    trained = (config.output_dir / "trained_prompts.hashes").read_bytes()
    assert len(trained) == 8 + 8 * 29  # one of the thirty rows is also an evaluation prompt
