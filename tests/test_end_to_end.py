"""The three steps as a user runs them: one command, real processes, the promised files."""

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


def metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def greedy(directory: Path, text: str) -> str:
    """Generate with plain transformers from a directory."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))


LAYOUTS = [
    "two processes with LoRA and an EMA",
    # Every other test of a whole run, as that of the installed package, is of one process.
    pytest.param("one process", marks=pytest.mark.grid),
]


@pytest.fixture(scope="module", params=LAYOUTS)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a short run of all three steps."""
    out = tmp_path_factory.mktemp("run") / "out"
    options: Sequence[str] = SHORT
    if request.param != "one process":
        roles = ("sft.model", "reward.model", "ppo.actor", "ppo.critic")
        lora = [word for role in roles for word in (f"--{role}.lora.rank", "4")]
        options = [*SHORT, *lora, "--deployment-type", "single_node", "--ppo.ema_decay", "0.9"]
    done = run_command("train.py", "--output-dir", str(out), *options)
    assert done.returncode == 0, done.stderr
    return out


def test_the_promised_files_are_there_and_say_what_was_promised(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())

    assert summary["seconds"] > 0
    assert summary["steps"].keys() == EVAL_KEYS.keys()
    for step, keys in EVAL_KEYS.items():
        assert keys <= summary["steps"][step]["eval"].keys()
        assert summary["steps"][step].keys() >= {"seconds", "steps", "tokens"}
        assert (finished / step / "config.yaml").is_file()
    assert [summary["steps"][step]["steps"] for step in EVAL_KEYS] == [3, 3, 2]
    assert metrics(finished / "step3_ppo/metrics.jsonl")[1].keys() >= PPO_METRICS
    assert "step3_ppo" in (finished / "report.html").read_text()
    assert (finished / "step3_ppo/actor/chat_template.jinja").is_file()


def test_nothing_is_a_pickle(finished: Path) -> None:
    assert [p for p in finished.rglob("*") if p.suffix in {".bin", ".pt", ".pth", ".pkl"}] == []


def test_plain_transformers_loads_every_model(finished: Path) -> None:
    for directory in ("step1_sft", "step3_ppo/actor"):
        assert isinstance(greedy(finished / directory, "Human: Hi\n\nAssistant:"), str)
    for directory in ("step2_reward", "step3_ppo/critic"):
        model = AutoModelForSequenceClassification.from_pretrained(finished / directory)
        assert model.config.num_labels == 1
        assert model(torch.tensor([[1, 5, 6, 2]])).logits.shape == (1, 1)


def test_the_first_rollout_is_of_the_reference_itself(finished: Path) -> None:
    first = next(line for line in metrics(finished / "step3_ppo/metrics.jsonl") if "score" in line)

    assert abs(first["kl"]) < 1e-4
    assert first["ratio_error"] < 1e-3
    assert first["rollout_gap"] < 1e-4


def test_samples_show_three_models_side_by_side(finished: Path) -> None:
    samples = json.loads((finished / "step3_ppo/samples.json").read_text())

    assert len(samples["rows"]) == 12
    models = ["base", "step1_sft", "step3_ppo"]
    assert all(list(row["answers"]) == models for row in samples["rows"])


def test_resume_skips_what_is_finished(finished: Path) -> None:
    config = (finished / "step1_sft/config.yaml").read_text()
    summary = (finished / "summary.json").read_text()
    two = "lora:\n  " in config or "rank: 4" in config
    roles = ("sft.model", "reward.model", "ppo.actor", "ppo.critic")
    lora = [word for role in roles for word in (f"--{role}.lora.rank", "4")]
    extra = [*lora, "--deployment-type", "single_node", "--ppo.ema_decay", "0.9"] if two else []

    done = run_command("train.py", "--output-dir", str(finished), *SHORT, *extra, "--resume")

    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("already finished") == 3
    assert (
        json.loads((finished / "summary.json").read_text())["steps"] == json.loads(summary)["steps"]
    )
