"""The step as a whole: its first loss, its reference, resuming, processes and micro-batches."""

import json
import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pipeline.config import ZeroConfig
from step3_preference import evaluate
from step3_preference.config import METHODS
from step3_preference.train import train
from tests.distributed import run_ranks
from tests.step3_preference.toy import metrics, toy_config

FIRST = {"ipo": 0.25, "hinge": 1.0, "kto": 0.5}
FIRST |= dict.fromkeys(("dpo", "cdpo", "rdpo", "ldpo"), math.log(2))
"""Loss of the first step, where the actor is its reference."""


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "actor" / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return all(torch.equal(first[name], second[name]) for name in first)


CASES = {
    of: [pytest.param(name, marks=() if name == of else pytest.mark.grid) for name in METHODS]
    for of in ("dpo", "kto")
}
"""All methods, by the one of them that is not of the grid."""


@pytest.mark.parametrize("method", METHODS)
def test_every_method_begins_where_its_formula_says_and_learns(
    method: str, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, calls = evaluate.evaluate_rows, list[object]()
    monkeypatch.setattr(evaluate, "evaluate_rows", lambda *x: calls.append(x) or measure(*x))
    config = toy_config(toy, method, output_dir=tmp_path, max_steps=3, eval_every=0)
    train(config)

    assert len(calls) == 2  # at the start and after the last step, whose weights are exported
    lines = metrics(tmp_path)
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
    whole, again = tmp_path / "whole", tmp_path / "again"
    config = toy_config(toy, method, output_dir=whole, save_every=2)
    train(config)
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "step_00000004")
    shutil.rmtree(again / "actor")
    (again / "result.json").unlink()

    train(replace(config, output_dir=again, resume=True))

    assert metrics(again) == metrics(whole)
    assert same(again, whole)
    start, *others = [line for line in metrics(whole) if "eval_loss" in line]
    assert start["eval_kl"] == 0.0
    names = {f"eval_{name}" for name in ("kl", "sampled_length", "sampled_stop_rate")}
    assert all(line.keys() > names and line["eval_kl"] != 0.0 for line in others)


@pytest.mark.parametrize("method", CASES["dpo"])
def test_one_and_two_processes_learn_the_same_to_the_bit(
    method: str, toy: Path, tmp_path: Path
) -> None:
    model = {"zero": ZeroConfig(reduction="deterministic")}
    config = toy_config(toy, method, output_dir=tmp_path / "1", model=model)
    train(config)
    run_ranks(train, replace(config, output_dir=tmp_path / "2"))

    assert same(tmp_path / "1", tmp_path / "2")
    for mine, theirs in zip(metrics(tmp_path / "1"), metrics(tmp_path / "2"), strict=True):
        for name in mine.keys() & {"loss", "z0", "accuracy", "eval_loss", "eval_kl"}:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name


def test_kto_learns_from_responses_with_a_label(toy: Path, tmp_path: Path) -> None:
    data = {"path": (str(toy / "labelled.jsonl"),), "split": (0.0, 0.0, 1.0)}
    train(toy_config(toy, "kto", data=data, output_dir=tmp_path, weight_rejected="auto"))

    result = json.loads((tmp_path / "result.json").read_text())["eval"]
    assert result["margin_after"] > 0
    assert result["accuracy_before"] == 0.5


@pytest.mark.jobs
def test_the_reference_is_read_again_and_computed_anew_for_other_rows(
    toy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = toy_config(toy, output_dir=tmp_path, max_steps=1, eval_every=0)
    train(config)
    file = tmp_path / "reference.safetensors"
    first = file.read_bytes()

    caplog.clear()
    train(config)
    assert "the reference's log-probabilities are those of" in caplog.text
    assert file.read_bytes() == first

    caplog.clear()
    train(replace(config, data=replace(config.data, max_length=60)))
    assert "computing the reference's log-probabilities, once" in caplog.text
    assert file.read_bytes() != first

    file.write_bytes(first[:100])
    caplog.clear()
    train(config)
    assert "computing the reference's log-probabilities, once" in caplog.text
    assert file.read_bytes() == first
