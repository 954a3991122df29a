"""The three steps as a user runs them: one command, real processes, the documented outputs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.commands import run_command

SHORT = [
    *("--sft.max_steps", "3", "--reward.max_steps", "3", "--ppo.max_steps", "2"),
    *("--sft.data.max_eval_rows", "16", "--reward.data.max_eval_rows", "16"),
    *("--ppo.data.max_eval_rows", "14", "--ppo.rollout_size", "16", "--ppo.batch_size", "8"),
    *("--ppo.samples_every", "1"),
]
"""A run of seconds."""

EVAL_KEYS = {
    "step1_sft": {"perplexity_before", "perplexity_after"},
    "step2_reward": {
        *("accuracy_before", "accuracy_after", "mean_chosen", "mean_rejected", "pairs")
    },
    "step3_ppo": {
        *("score_before", "score_after", "kl", "win_rate"),
        *("length_before", "length_after", "stop_rate"),
    },
}

PPO_METRICS = {
    *("step", "score", "kl", "entropy", "policy_loss", "value_loss", "clip_fraction", "ratio_max"),
    *("explained_variance", "response_length", "stop_rate", "rollout_gap"),
    *("seconds_generation", "seconds_experience", "seconds_training"),
}


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def generate(directory: Path, text: str) -> str:
    """Generate with plain transformers from a directory."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))


LAYOUTS = [
    "two processes with LoRA and an EMA",
    # Other tests of full runs, such as that of the installed package, use one process.
    pytest.param("one process", marks=pytest.mark.grid),
]


@pytest.fixture(scope="module", params=LAYOUTS)
def run_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a short run of all three steps."""
    out = tmp_path_factory.mktemp("run") / "out"
    options: Sequence[str] = SHORT
    if request.param != "one process":
        roles = ("sft.model", "reward.model", "ppo.actor", "ppo.critic")
        lora = [word for role in roles for word in (f"--{role}.lora.rank", "4")]
        options = [*SHORT, *lora, "--deployment-type", "single_node", "--ppo.ema_decay", "0.9"]
    result = run_command("train.py", "--output-dir", str(out), *options)
    assert result.returncode == 0, result.stderr
    return out


def test_run_writes_the_documented_files_and_figures(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())

    assert summary["seconds"] > 0
    assert summary["steps"].keys() == EVAL_KEYS.keys()
    for step, keys in EVAL_KEYS.items():
        assert keys <= summary["steps"][step]["eval"].keys()
        assert summary["steps"][step].keys() >= {"seconds", "steps", "tokens"}
        assert (run_dir / step / "config.yaml").is_file()
    assert [summary["steps"][step]["steps"] for step in EVAL_KEYS] == [3, 3, 2]
    assert read_jsonl(run_dir / "step3_ppo/metrics.jsonl")[1].keys() >= PPO_METRICS
    assert "step3_ppo" in (run_dir / "report.html").read_text()
    assert (run_dir / "step3_ppo/actor/chat_template.jinja").is_file()


def test_run_writes_no_pickles(run_dir: Path) -> None:
    assert [p for p in run_dir.rglob("*") if p.suffix in {".bin", ".pt", ".pth", ".pkl"}] == []


def test_transformers_loads_every_exported_model(run_dir: Path) -> None:
    for directory in ("step1_sft", "step3_ppo/actor"):
        assert isinstance(generate(run_dir / directory, "Human: Hi\n\nAssistant:"), str)
    for directory in ("step2_reward", "step3_ppo/critic"):
        model = AutoModelForSequenceClassification.from_pretrained(run_dir / directory)
        assert model.config.num_labels == 1
        assert model(torch.tensor([[1, 5, 6, 2]])).logits.shape == (1, 1)


def test_first_rollout_has_zero_kl_to_the_reference(run_dir: Path) -> None:
    first = next(row for row in read_jsonl(run_dir / "step3_ppo/metrics.jsonl") if "score" in row)

    assert abs(first["kl"]) < 1e-4
    assert first["ratio_error"] < 1e-3
    assert first["rollout_gap"] < 1e-4


def test_samples_contain_the_answers_of_three_models(run_dir: Path) -> None:
    samples = json.loads((run_dir / "step3_ppo/samples.json").read_text())

    assert len(samples["rows"]) == 12
    models = ["base", "step1_sft", "step3_ppo"]
    assert all(list(row["answers"]) == models for row in samples["rows"])


def test_resume_skips_finished_steps(run_dir: Path) -> None:
    config = (run_dir / "step1_sft/config.yaml").read_text()
    summary = (run_dir / "summary.json").read_text()
    is_lora = "lora:\n  " in config or "rank: 4" in config
    roles = ("sft.model", "reward.model", "ppo.actor", "ppo.critic")
    lora = [word for role in roles for word in (f"--{role}.lora.rank", "4")]
    extra = [*lora, "--deployment-type", "single_node", "--ppo.ema_decay", "0.9"] if is_lora else []

    result = run_command("train.py", "--output-dir", str(run_dir), *SHORT, *extra, "--resume")

    assert result.returncode == 0, result.stderr
    assert (result.stdout + result.stderr).count("already finished") == 3
    assert (
        json.loads((run_dir / "summary.json").read_text())["steps"] == json.loads(summary)["steps"]
    )
