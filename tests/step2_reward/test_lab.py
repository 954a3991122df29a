"""The laboratory's command and what step 2 leaves of it: files, report, sentences, wrong input."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import EMBEDDED, DataConfig, FrozenModelConfig
from pipeline.data.examples import Example, Message
from pipeline.models.hf.chat import load_chat
from pipeline.report.page import write_report
from step2_reward.lab.__main__ import main
from step2_reward.lab.measure import change_response
from step2_reward.train import train
from tests.step2_reward.labelled import make_rows, save_base, task, write_jsonl


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Outputs of step 2 on pairs and on classes."""
    out = tmp_path_factory.mktemp("out")
    base = save_base(out / "base")
    for kind in ("pairs", "classes"):
        data = write_jsonl(out / f"{kind}.jsonl", make_rows(kind))
        train(task(out, data, base, output_dir=out / kind / "step2_reward"))
    return out


def lab(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "lab.json").read_text())


def test_step_2_ends_with_figures_predictions_and_their_part_of_the_report(trained: Path) -> None:
    step = trained / "pairs" / "step2_reward"
    found = lab(step)
    result = json.loads((step / "result.json").read_text())["eval"]
    lines = (step / "predictions.jsonl").read_text().splitlines()

    assert found["accuracy"]["value"] == result["accuracy_after"] == 1.0
    assert found["accuracy"]["count"] == found["rows"] == len(lines) == result["pairs"]
    assert found["calibration"]["ece"] == result["calibration_error"]
    assert "probes" not in found  # changed responses are scored by the command alone
    first = json.loads(lines[0])
    assert len(first["scores"]) == len(first["responses"]) == 2
    assert first["right"] == (first["scores"][0] > first["scores"][1])
    page = write_report(trained / "pairs").read_text()
    assert "how far it can be trusted" in page
    assert found["sentences"][0] in page
    assert page.count("<svg") >= 1


def test_the_command_reads_named_columns_and_scores_changed_responses(
    trained: Path, tmp_path: Path
) -> None:
    rows = make_rows("pairs")
    data = write_jsonl(
        tmp_path / "renamed.jsonl", [{**row, "good": row.pop("chosen")} for row in rows]
    )

    step = str(trained / "pairs" / "step2_reward")
    named = ["--fields", "chosen=good", "--output-dir", str(tmp_path)]
    main(["--path", step, "--data-path", str(data), *named])

    probes = lab(tmp_path)["probes"]
    assert set(probes) == {"no_end", "truncated", "doubled"}
    assert all(0 <= each["lower"] <= 1 and each["responses"] > 0 for each in probes.values())


def test_the_command_measures_an_exported_model_as_the_step_did(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step, data = trained / "classes" / "step2_reward", trained / "classes.jsonl"

    main(["--path", str(step), "--data-path", str(data)])

    found = lab(step / "lab")
    assert found["rows"] == 48
    assert found["accuracy"]["value"] == 1.0
    assert [sum(row) for row in found["confusion"]] == [16, 16, 16]
    assert [each["name"] for each in found["classes"]] == ["curt", "polite", "rude"]
    assert "probes" not in found  # named classes without values give no score
    out = capsys.readouterr().out
    assert "100.0 % of 48 rows are classified correctly" in out
    held_out = [json.loads(line) for line in (step / "predictions.jsonl").read_text().splitlines()]
    again = {
        row["origin"]: row["probabilities"]
        for row in map(json.loads, (step / "lab" / "predictions.jsonl").read_text().splitlines())
    }
    for row in held_out:
        assert again[row["origin"]] == pytest.approx(row["probabilities"], abs=1e-6)


def test_a_response_is_probed_without_its_end_cut_in_half_and_repeated() -> None:
    chat = load_chat(FrozenModelConfig(path=EMBEDDED), DataConfig())
    prompt = (Message("user", "Hi"),)
    example = Example(prompt, (Message("assistant", "abcdef"),))
    before = chat.encode_prompt(prompt)
    full = chat.encode(prompt, example.chosen).input_ids
    *said, end = full[len(before) :]
    doubled = chat.encode(prompt, (Message("assistant", "abcdef abcdef"),)).input_ids

    found = change_response(example, chat, max_length=len(doubled))

    half = said[: len(said) // 2]
    assert [each.input_ids for each in found] == [full, full[:-1], [*before, *half, end], doubled]
    assert change_response(example, chat, max_length=len(doubled) - 1) == []
    for given, text, kept in ((prompt, "ab", 4), (prompt, "a", 0), ((), "ab", 0)):
        other = Example(given, (Message("assistant", text),))
        assert len(change_response(other, chat, max_length=99)) == kept
