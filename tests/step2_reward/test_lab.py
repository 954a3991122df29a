"""The laboratory's command, and its files and report section in step 2."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import EMBEDDED, DataConfig, FrozenModelConfig
from pipeline.data.examples import Example, Message
from pipeline.models.hf.chat import load_chat
from pipeline.report.page import write_report
from pipeline.system.errors import ConfigError
from step2_reward.lab.__main__ import main
from step2_reward.lab.measure import change_response
from step2_reward.train import train
from tests.families import save_base
from tests.step2_reward.labeled import make_config, make_rows, write_jsonl


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Outputs of step 2 on pairs and on classes."""
    out = tmp_path_factory.mktemp("out")
    base = save_base(out / "base")
    for kind in ("pairs", "classes"):
        data = write_jsonl(out / f"{kind}.jsonl", make_rows(kind))
        train(make_config(out, data, base, output_dir=out / kind / "step2_reward"))
    return out


def read_lab(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "lab.json").read_text())


def test_step2_writes_lab_figures_predictions_and_report(trained: Path) -> None:
    step = trained / "pairs" / "step2_reward"
    figures = read_lab(step)
    result = json.loads((step / "result.json").read_text())["eval"]
    lines = (step / "predictions.jsonl").read_text().splitlines()

    assert figures["accuracy"]["value"] == result["accuracy_after"] == 1.0
    assert figures["accuracy"]["count"] == figures["rows"] == len(lines) == result["pairs"]
    assert figures["calibration"]["ece"] == result["calibration_error"]
    assert "probes" not in figures  # only the command scores changed responses
    first = json.loads(lines[0])
    assert len(first["scores"]) == len(first["responses"]) == 2
    assert first["right"] == (first["scores"][0] > first["scores"][1])
    page = write_report(trained / "pairs").read_text()
    assert "how far it can be trusted" in page
    assert figures["sentences"][0] in page
    assert page.count("<svg") >= 1


def test_command_maps_columns_and_scores_changed_responses(trained: Path, tmp_path: Path) -> None:
    rows = make_rows("pairs")
    data = write_jsonl(
        tmp_path / "renamed.jsonl", [{**row, "good": row.pop("chosen")} for row in rows]
    )

    step = str(trained / "pairs" / "step2_reward")
    options = ["--fields", "chosen=good", "--output-dir", str(tmp_path)]
    main(["--path", step, "--data-path", str(data), *options])

    probes = read_lab(tmp_path)["probes"]
    assert set(probes) == {"no_end", "truncated", "doubled"}
    with pytest.raises(ConfigError, match="output-dir"):
        main(["--path", step, "--data-path", str(data), "--output-dir", str(data)])
    assert all(0 <= probe["lower"] <= 1 and probe["responses"] > 0 for probe in probes.values())


def test_command_measures_exported_model_like_the_step(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step, data = trained / "classes" / "step2_reward", trained / "classes.jsonl"

    main(["--path", str(step), "--data-path", str(data)])

    figures = read_lab(step / "lab")
    assert figures["rows"] == 48
    assert figures["accuracy"]["value"] == 1.0
    assert [sum(row) for row in figures["confusion"]] == [16, 16, 16]
    assert [row["name"] for row in figures["classes"]] == ["curt", "polite", "rude"]
    assert "probes" not in figures  # classes without values have no score
    out = capsys.readouterr().out
    assert "100.0% of 48 rows are classified correctly" in out
    held_out = [json.loads(line) for line in (step / "predictions.jsonl").read_text().splitlines()]
    probabilities = {
        row["origin"]: row["probabilities"]
        for row in map(json.loads, (step / "lab" / "predictions.jsonl").read_text().splitlines())
    }
    for row in held_out:
        assert probabilities[row["origin"]] == pytest.approx(row["probabilities"], abs=1e-6)


def test_changed_responses_are_endless_halved_and_repeated() -> None:
    chat = load_chat(FrozenModelConfig(path=EMBEDDED), DataConfig())
    prompt = (Message("user", "Hi"),)
    example = Example(prompt, (Message("assistant", "abcdef"),))
    prompt_ids = chat.encode_prompt(prompt)
    full = chat.encode(prompt, example.chosen).input_ids
    *response_ids, end = full[len(prompt_ids) :]
    doubled = chat.encode(prompt, (Message("assistant", "abcdef abcdef"),)).input_ids

    versions = change_response(example, chat, max_length=len(doubled))

    halved = [*prompt_ids, *response_ids[: len(response_ids) // 2], end]
    assert [version.input_ids for version in versions] == [full, full[:-1], halved, doubled]
    assert change_response(example, chat, max_length=len(doubled) - 1) == []
    for context, text, num_versions in ((prompt, "ab", 4), (prompt, "a", 0), ((), "ab", 0)):
        other = Example(context, (Message("assistant", text),))
        assert len(change_response(other, chat, max_length=99)) == num_versions
