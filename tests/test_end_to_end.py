"""The three steps as a user runs them: one command, real processes, the documented outputs."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.commands import run_command
from tests.inference.test_responses import read_rows

pytestmark = pytest.mark.jobs

SHORT = {
    "sft": ("--sft.max_steps", "3", "--sft.data.max_eval_rows", "16"),
    "reward": ("--reward.max_steps", "3", "--reward.data.max_eval_rows", "16"),
    "ppo": (
        *("--ppo.max_steps", "2", "--ppo.rollout_size", "16", "--ppo.batch_size", "8"),
        *("--ppo.samples_every", "1", "--ppo.data.max_eval_rows", "14"),
    ),
}
"""Settings of each step for a run of seconds."""

LORA = {
    "sft": ("--sft.model.lora.rank", "4"),
    "reward": ("--reward.model.lora.rank", "4"),
    "ppo": ("--ppo.actor.lora.rank", "4", "--ppo.critic.lora.rank", "4"),
}

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


def generate(directory: Path, text: str) -> str:
    """Generate with plain transformers from a directory."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))


def run(out: Path, sections: Sequence[str], *options: str) -> str:
    """Return the output of `train.py` with short steps and adapters."""
    settings = [word for section in sections for word in (*SHORT[section], *LORA[section])]
    result = run_command("train.py", "--output-dir", str(out), *settings, *options)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a short run of all three steps, step 3 on two processes."""
    out = tmp_path_factory.mktemp("run") / "out"
    run(out, ("sft", "reward"), "--step", "1", "2")
    run(out, ("ppo",), "--step", "3", "--deployment-type", "single_node", "--ppo.ema_decay", "0.9")
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
    assert read_rows(run_dir / "step3_ppo/metrics.jsonl")[1].keys() >= PPO_METRICS
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
    first = next(row for row in read_rows(run_dir / "step3_ppo/metrics.jsonl") if "score" in row)

    assert abs(first["kl"]) < 1e-4
    assert first["ratio_error"] < 1e-3
    assert first["rollout_gap"] < 1e-4


def test_samples_contain_the_answers_of_three_models(run_dir: Path) -> None:
    samples = json.loads((run_dir / "step3_ppo/samples.json").read_text())

    assert len(samples["rows"]) == 12
    models = ["base", "step1_sft", "step3_ppo"]
    assert all(list(row["answers"]) == models for row in samples["rows"])


def test_resume_skips_finished_steps(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())

    output = run(run_dir, list(SHORT), "--ppo.ema_decay", "0.9", "--resume")

    assert output.count("already finished") == 3
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == summary["steps"]
