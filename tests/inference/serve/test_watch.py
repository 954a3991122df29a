"""A run in progress, as the page shows it."""

import json
import os
from pathlib import Path

from inference.serve.watch import WatchedRun


def lines(*steps: int, name: str = "loss") -> str:
    return "".join(json.dumps({"step": step, name: step / 2}) + "\n" for step in steps)


def test_a_view_says_what_is_new_and_how_each_step_stands(tmp_path: Path) -> None:
    watched = WatchedRun(tmp_path)
    assert "has no step yet" in watched.view("", "")["notice"]
    for name in ("step1_sft", "step2_reward"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(lines(1, 2))
    answers = {
        "rows": [
            {"prompt": [{"role": "user", "content": "Hi"}], "answers": {"base": {"text": "Yo"}}}
        ]
    }
    (tmp_path / "step2_reward" / "samples.json").write_text(json.dumps(answers))
    (tmp_path / "step1_sft" / "result.json").write_text('{"seconds": 1}')
    os.utime(tmp_path / "step1_sft" / "metrics.jsonl", (1, 1))

    first = watched.view("", "")
    again = watched.view("", first["version"])

    assert first["step"] == "step2_reward"
    assert [(each["name"], each["state"]) for each in first["steps"]] == [
        ("step1_sft", "finished"),
        ("step2_reward", "not finished"),
    ]
    (chart,) = first["charts"]
    assert (chart["title"], chart["names"], chart["last"]) == ("Loss", ["training"], "1")
    assert chart["picture"].startswith("<svg ")
    assert first["samples"] == [{"prompt": "Hi", "answers": {"base": "Yo"}}]
    assert again["unchanged"] is True
    (tmp_path / "step2_reward" / "diverged.json").write_text('{"sentence": "the loss is NaN"}')
    later = watched.view("", first["version"])
    assert later["alarms"] == ["the loss is NaN"]
    assert watched.view("step1_sft", "")["step"] == "step1_sft"
    assert watched.view("../../etc", "")["step"] == "step2_reward"
