"""A run in progress, as the page shows it."""

import json
import os
import time
from pathlib import Path

import pytest

from inference.serve.watch import WatchedRun


def lines(*steps: int, name: str = "loss") -> str:
    return "".join(json.dumps({"step": step, name: step / 2}) + "\n" for step in steps)


def test_a_view_says_what_is_new_and_how_each_step_stands(tmp_path: Path) -> None:
    watched = WatchedRun(tmp_path)
    assert "has no step yet" in watched.view("", "")["notice"]
    for name in ("step1_sft", "step2_reward"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(lines(1, 2))
    row = {"prompt": [{"role": "user", "content": "Hi"}], "answers": {"base": {"text": "Yo"}}}
    (tmp_path / "step2_reward" / "samples.json").write_text(json.dumps({"rows": [row]}))
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
    guard = {"step": 3, "action": "warn", "sentence": "answers grow", "unit": "step"}
    warned = lines(1, 2) + json.dumps({"guard": guard})
    (tmp_path / "step2_reward" / "metrics.jsonl").write_text(warned)
    later = watched.view("", first["version"])
    assert later["alarms"] == ["the loss is NaN", "step 3, warned: answers grow"]
    assert watched.view("step1_sft", "")["step"] == "step1_sft"
    assert watched.view("../../etc", "")["step"] == "step2_reward"


@pytest.mark.parametrize(
    ("begun", "last", "count", "said"),  # seconds before now, and number of lines
    [
        (900, 100, 25, "step1_sft has written nothing for 100 seconds; a line took 32.0 before"),
        (900, 100, 22, ""),
        (40, 32, 80, "step1_sft has written nothing for 32 seconds; a line took 0.1 before"),
        (40, 28, 80, ""),
    ],
)
def test_a_silent_step_is_reported(
    begun: int, last: int, count: int, said: str, tmp_path: Path
) -> None:
    step, watched, now = tmp_path / "step1_sft", WatchedRun(tmp_path), time.time()
    step.mkdir()
    (step / "metrics.jsonl").write_text(lines(*range(count)))
    (step / "config.yaml").write_text("{}")
    os.utime(step / "metrics.jsonl", (now - last, now - last))
    os.utime(step / "config.yaml", (now - begun, now - begun))

    assert watched.view("step1_sft", "")["notice"] == said
    (step / "result.json").write_text('{"seconds": 1}')
    assert watched.view("step1_sft", "")["notice"] == ""
