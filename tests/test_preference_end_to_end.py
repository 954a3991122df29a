"""Preference methods as a user runs them: one command, real processes, the documented outputs."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.step3_ppo.toy import save_models
from tests.step3_preference.toy import save_toy
from tests.test_methods_end_to_end import STEP3, run_train

SHORT = [
    *("--preference.max_steps", "3", "--preference.eval_every", "1"),
    *("--preference.batch_size", "8", "--preference.max_new_tokens", "6"),
    *("--preference.data.max_eval_rows", "8", "--preference.base.path", "null"),
]


def read_step_summaries(out: Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text())["steps"]


@pytest.mark.jobs
def test_dpo_and_ppo_are_compared_at_equal_kl_and_scored_by_both_judges(tmp_path: Path) -> None:
    save_models(tmp_path)
    paths = {"ppo.actor": "actor", "ppo.critic": "reward", "ppo.reward": "reward"}
    paths |= {"preference.model": "actor", "preference.reward": "reward"}
    models = [
        word for role, name in paths.items() for word in (f"--{role}.path", f"{tmp_path}/{name}")
    ]
    rate = ("--preference.model.optim.lr", "1e-2", "--preference.keep_best", "false")
    out = tmp_path / "out"

    both = run_train(out, "--method", "ppo", "dpo", *STEP3[:-2], *SHORT, *models, *rate)

    assert both.returncode == 0, both.stderr
    assert read_step_summaries(out).keys() == {"step3_ppo", "step3_dpo"}
    assert "At equal KL (" in both.stdout
    figures = read_step_summaries(out)["step3_dpo"]["eval"]
    assert figures["judge"].keys() == {"start", "step3_dpo"}
    assert figures["kl"] > 0
    assert {"score_before", "score_after", "win_rate", "margin_after"} <= figures.keys()
    page = (out / "report.html").read_text()
    assert "The methods side by side" in page
    assert "implicit rewards put" in page


@pytest.mark.faults
def test_kto_with_lora_runs_on_two_processes_and_resume_skips_it(tmp_path: Path) -> None:
    save_toy(tmp_path)
    out = tmp_path / "out"
    command = [
        *("--step", "3", "--method", "kto", "--plan", "off", "--num-processes", "2"),
        *("--deployment-type", "single_node", "--actor-model", str(tmp_path / "actor")),
        *("--preference.model.path", str(tmp_path / "actor"), "--lora", "2"),
        *("--data-path", str(tmp_path / "labeled.jsonl"), "--data-split", "0,0,1"),
        *(*SHORT, "--preference.max_prompt_length", "48", "--max-length", "64"),
    ]

    result = run_train(out, *command)

    assert result.returncode == 0, result.stderr
    figures = read_step_summaries(out)["step3_kto"]["eval"]
    assert figures["win_rate"] is None  # no judge
    assert figures["pairs"] == 4  # rows held out
    assert (out / "step3_kto" / "actor" / "adapter" / "adapter_config.json").is_file()
    AutoModelForCausalLM.from_pretrained(out / "step3_kto" / "actor")
    resumed = run_train(out, *command, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "skipping step 3: already finished" in resumed.stdout
