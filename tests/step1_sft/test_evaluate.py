"""Side-by-side comparison of two models."""

import json
from pathlib import Path

import pytest

from inference.generate import main as generate
from pipeline.system.errors import ConfigError
from step1_sft.evaluate import main


def test_comparison_contains_the_generated_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "Hi"}\n{"prompt": "What is 3 plus 4?"}\n')
    common = ["--prompts", str(prompts), "--max-new-tokens", "5"]
    generate(["--path", "embedded", *common, "--out", str(tmp_path / "answers.jsonl")])

    models = ["--baseline", "embedded", "--model", "embedded"]
    main([*models, *common, "--out", str(tmp_path / "comparison.json")])

    rows = (tmp_path / "answers.jsonl").read_text().splitlines()
    answers = [json.loads(row)["answers"][0] for row in rows]
    comparison = json.loads((tmp_path / "comparison.json").read_text())
    assert comparison["rows"] == [
        {"prompt": prompt, "baseline": answer, "model": answer}
        for prompt, answer in zip(["Hi", "What is 3 plus 4?"], answers, strict=True)
    ]
    assert capsys.readouterr().out.startswith(f"Prompt:   Hi\nBaseline: {answers[0]}\n")


def test_deepspeed_chat_option_names_are_accepted(tmp_path: Path) -> None:
    out = tmp_path / "comparison.json"

    main(["--model_name_or_path_baseline", "embedded", "--model_name_or_path_finetune", "embedded",
          "--max_new_tokens", "1", "--out", str(out)])  # fmt: skip

    assert json.loads(out.read_text())["paths"] == {"baseline": "embedded", "model": "embedded"}


def test_unwritable_output_is_rejected_before_models_load(tmp_path: Path) -> None:
    models = ["--baseline", str(tmp_path / "absent"), "--model", str(tmp_path / "absent")]

    with pytest.raises(ConfigError, match=f"--out {tmp_path}"):
        main([*models, "--out", str(tmp_path)])
