"""Preference training: initial loss, reference, resuming, and several processes."""

import json
import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from pipeline.config import ZeroConfig
from step3_preference import evaluate
from step3_preference.config import METHODS
from step3_preference.train import train
from tests.distributed import run_ranks
from tests.step3_ppo.test_best_actor import same_weights
from tests.step3_preference.toy import toy_config
from tests.test_resume import read_metrics

FIRST = {"ipo": 0.25, "hinge": 1.0, "kto": 0.5}
FIRST |= dict.fromkeys(("dpo", "cdpo", "rdpo", "ldpo"), math.log(2))
"""Loss of the first step, in which the actor equals the reference."""


CASES = {
    short: [pytest.param(name, marks=() if name == short else pytest.mark.grid) for name in METHODS]
    for short in ("dpo", "kto")
}
"""All methods, keyed by the only one outside the grid."""


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_its_initial_loss_and_learns(
    method: str, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, calls = evaluate.evaluate_rows, list[object]()
    monkeypatch.setattr(evaluate, "evaluate_rows", lambda *x: calls.append(x) or measure(*x))
    config = toy_config(toy, method, output_dir=tmp_path, max_steps=3, eval_every=0)
    train(config)

    assert len(calls) == 2  # at the start and after the last step, whose weights are exported
    lines = read_metrics(tmp_path)
    first = next(line for line in lines if line["step"] == 1)
    if method in FIRST:
        assert first["loss"] == pytest.approx(FIRST[method], rel=1e-6)
        assert first["reward_chosen"] == first["reward_rejected"] == first["margin"] == 0.0
        assert first["accuracy"] == 0.5  # ties
        assert lines[0]["eval_loss"] == pytest.approx(FIRST[method], rel=1e-6)
        assert lines[0]["eval_kl"] == 0.0
    result = json.loads((tmp_path / "result.json").read_text())["eval"]
    assert result["margin_after"] > result["margin_before"]
    assert result.keys() >= {
        *("kl", "win_rate", "stop_rate", "length_before", "length_after", "accuracy_after"),
        *("margin_after", "pairs", "best_step"),
    }
    AutoModelForCausalLM.from_pretrained(tmp_path / "actor")


@pytest.mark.parametrize("method", CASES["kto"])
def test_interrupted_run_resumes_bitwise(method: str, toy: Path, tmp_path: Path) -> None:
    full, resumed = tmp_path / "whole", tmp_path / "again"
    config = toy_config(toy, method, output_dir=full, save_every=2)
    train(config)
    shutil.copytree(full, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_00000004")
    shutil.rmtree(resumed / "actor")
    (resumed / "result.json").unlink()

    train(replace(config, output_dir=resumed, resume=True))

    assert read_metrics(resumed) == read_metrics(full)
    assert same_weights(resumed / "actor", full / "actor")
    initial, *others = [line for line in read_metrics(full) if "eval_loss" in line]
    assert initial["eval_kl"] == 0.0
    names = {f"eval_{name}" for name in ("kl", "sampled_length", "sampled_stop_rate")}
    assert all(line.keys() > names and line["eval_kl"] != 0.0 for line in others)


@pytest.mark.parametrize("method", CASES["dpo"])
def test_weights_of_one_and_two_processes_are_bitwise_equal(
    method: str, toy: Path, tmp_path: Path
) -> None:
    model = {"zero": ZeroConfig(reduction="deterministic")}
    config = toy_config(toy, method, output_dir=tmp_path / "1", model=model)
    train(config)
    run_ranks(train, replace(config, output_dir=tmp_path / "2"))

    assert same_weights(tmp_path / "1" / "actor", tmp_path / "2" / "actor")
    for line, expected in zip(
        read_metrics(tmp_path / "1"), read_metrics(tmp_path / "2"), strict=True
    ):
        for name in line.keys() & {"loss", "z0", "accuracy", "eval_loss", "eval_kl"}:
            assert line[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name


def test_kto_learns_from_labeled_responses(toy: Path, tmp_path: Path) -> None:
    data = {"path": (str(toy / "labeled.jsonl"),), "split": (0.0, 0.0, 1.0)}
    train(toy_config(toy, "kto", data=data, output_dir=tmp_path, weight_rejected="auto"))

    result = json.loads((tmp_path / "result.json").read_text())["eval"]
    assert result["margin_after"] > 0
    assert result["accuracy_before"] == 0.5


@pytest.mark.jobs
def test_reference_is_cached_and_recomputed_for_other_rows(
    toy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = toy_config(toy, output_dir=tmp_path, max_steps=1, eval_every=0)
    train(config)
    file = tmp_path / "reference.safetensors"
    first = file.read_bytes()

    caplog.clear()
    train(config)
    assert "using the reference's log-probabilities from" in caplog.text
    assert file.read_bytes() == first

    caplog.clear()
    train(replace(config, data=replace(config.data, max_length=60)))
    assert "computing the reference's log-probabilities once" in caplog.text
    assert file.read_bytes() != first

    file.write_bytes(first[:100])
    caplog.clear()
    train(config)
    assert "computing the reference's log-probabilities once" in caplog.text
    assert file.read_bytes() == first
