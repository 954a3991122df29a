"""From clicks in the page to a reward model that prefers what the clicker did."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inference.ratings.file import RatingsFile, read_ratings
from inference.serve.models import models_of_run
from pipeline.demo.task import POLITE
from tests.inference.serve.serving import in_browser, serving

ROOT = Path(__file__).parent.parent.parent.parent
CLICKS = 40


def train(*options: str) -> None:
    """A run of `train.py` in a process of its own."""
    ended = subprocess.run(
        [sys.executable, "train.py", *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]


def is_polite(text: str) -> bool:
    return text.strip().startswith(POLITE)


@pytest.mark.serve
@pytest.mark.timeout(1500)
@in_browser
def test_40_clicks_by_a_rule_make_a_reward_model_that_follows_it(
    browser: Any, tmp_path: Path
) -> None:
    """The rule: of two samples of step 1 the polite one; else it is a tie."""
    out = str(tmp_path / "out")
    train("--step", "1", "--sft.max_steps", "300", "--output-dir", out)
    file = tmp_path / "out" / "ratings.jsonl"
    prompts = [f"What is {one} plus {two}?" for one in range(2, 14) for two in range(2, 14)]
    (sft,) = [each for each in models_of_run(Path(out)) if each.name == "step1_sft"]
    with serving((sft,), log_requests=False) as server:
        server.state.ratings = RatingsFile(file)
        page = browser.new_page()
        page.set_default_timeout(30_000)
        page.goto(f"{server.url}/#rate")
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Temperature").fill("1")
        page.get_by_label("Prompts", exact=True).fill("\n".join(prompts))
        page.get_by_role("button", name="Begin").click()
        click_by_rule(page)
        page.close()

    chosen = [each for each in read_ratings(file) if each.get("choice") is not None]
    assert len(chosen) >= CLICKS
    assert all(is_polite(each["answers"][each["choice"]]["text"]) for each in chosen)
    options = ("--data-split", "0,1,0", "--reward.data.eval_fraction", "0.3", "--overwrite")
    steps = ("--reward.max_steps", "60", "--reward.batch_size", "16")
    train("--step", "2", "--data-path", str(file), *steps, *options, "--output-dir", out)
    result = json.loads((tmp_path / "out" / "step2_reward" / "result.json").read_text())
    assert result["eval"]["pairs"] >= 8
    assert result["eval"]["accuracy_after"] > 0.7


def click_by_rule(page: Any) -> None:
    """Rate until that many pairs have a choice."""
    clicks = rated = 0
    while clicks < CLICKS:
        page.get_by_text(re.compile(rf"of 144, {rated} rated")).wait_for()
        page.get_by_role("group", name="Rating").wait_for()
        left, right = map(is_polite, page.locator(".card .text").all_inner_texts())
        key = "3" if left == right else "1" if left else "2"
        page.keyboard.press(key)
        clicks += key != "3"
        rated += 1
