"""Step 0: loss and perplexity, equal results on several processes, resuming and warm starts."""

import json
import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.config import OptimConfig, TextDataConfig, TrainedModelConfig
from pipeline.data.store.pack import pack
from pipeline.data.store.rows import TokenRow
from pipeline.data.store.token_file import read_vocabulary
from pipeline.demo.model import build_tokenizer
from pipeline.system.errors import CheckpointError, ConfigError
from step0_pretrain.config import PretrainConfig
from step0_pretrain.rows import load_rows
from step0_pretrain.train import train
from tests.distributed import run_ranks
from tests.families import save_base
from tests.pipeline.data.store.corpus import write_rows
from tests.test_resume import read_checkpoint, read_metric, read_metrics

WORDS = ["sun", "moon", "rain", "wind", "bread", "water", "stone", "river", "cloud", "night"]


def pack_texts(out: Path, count: int, *, seed: int = 0) -> None:
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(3, 90))) for _ in range(count)]
    source = out.with_suffix(".jsonl")
    write_rows(source, texts)
    pack([source], read_vocabulary(build_tokenizer(), "embedded"), out)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama and two hundred packed texts."""
    directory = tmp_path_factory.mktemp("inputs")
    save_base(directory / "base")
    pack_texts(directory / "texts", 200)
    return directory


def make_config(inputs: Path, out: Path, **changes: Any) -> PretrainConfig:
    optim = OptimConfig(lr=0.003, warmup_steps=2)
    settings: dict[str, Any] = {
        "output_dir": out,
        "model": TrainedModelConfig(path=str(inputs / "base"), optim=optim),
        "data": TextDataConfig(
            path=(str(inputs / "texts"),), max_length=48, max_eval_rows=8, eval_fraction=0.1
        ),
        "max_steps": 4,
        "batch_size": 8,
        "micro_batch_size": 4,
        "save_every": 2,
        "eval_every": 2,
    }
    return PretrainConfig(**{**settings, **changes})


@torch.no_grad()
def plain_perplexity(path: Path, rows: Sequence[TokenRow]) -> float:
    """Compute the perplexity with transformers, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(path)
    nll, count = 0.0, 0
    for row in rows:
        for ids in row.sequences():
            if len(ids) > 1:
                labels = torch.tensor([ids.tolist()])
                nll += (len(ids) - 1) * model(labels, labels=labels).loss.item()
                count += len(ids) - 1
    return math.exp(nll / count)


def test_loss_and_perplexity_match_transformers(inputs: Path, tmp_path: Path) -> None:
    config = make_config(inputs, tmp_path / "out", max_steps=12, eval_every=None)

    train(config)

    rows = load_rows(config, build_tokenizer())
    held_out = rows.corpus.eval_rows
    first_ids = {
        int(ids[0])
        for row in held_out
        for span, ids in zip(row.spans, row.sequences(), strict=True)
        if span.is_first
    }
    assert first_ids == {build_tokenizer().bos_token_id}
    figures = json.loads((config.output_dir / "result.json").read_text())["eval"]
    assert figures["perplexity_before"] == pytest.approx(
        plain_perplexity(inputs / "base", held_out), rel=1e-4
    )
    assert figures["perplexity_after"] == pytest.approx(
        plain_perplexity(config.output_dir, held_out), rel=1e-4
    )
    assert figures["perplexity_after"] < 0.5 * figures["perplexity_before"]
    is_held_out = rows.corpus.held_out.contains
    batches = [rows.corpus.next_rows() for _ in range(12)]
    kept = [[row.without(is_held_out) for row in batch] for batch in batches]
    tokens = [sum(map(len, batch)) for batch in kept]
    assert read_metric(config, "tokens") == tokens
    assert sum(tokens) < sum(len(row) for batch in batches for row in batch)
    assert read_metric(config, "loss")[0] == pytest.approx(
        math.log(plain_perplexity(inputs / "base", kept[0])), rel=1e-4
    )


def train_and_read_order(config: PretrainConfig) -> list[list[tuple[int, ...]]]:
    train(config)
    rows = load_rows(config, build_tokenizer())
    batches = [rows.corpus.next_rows() for _ in range(6)]
    return [[row.spans[0].start for row in batch] for batch in batches]


@pytest.mark.jobs
def test_row_order_and_losses_match_on_any_number_of_processes(
    inputs: Path, tmp_path: Path
) -> None:
    configs = {n: make_config(inputs, tmp_path / f"{n}") for n in (1, 4)}

    orders = {
        n: run_ranks(train_and_read_order, config, world_size=n)
        if n > 1
        else [train_and_read_order(config)]
        for n, config in configs.items()
    }

    assert all(order == orders[1][0] for by_rank in orders.values() for order in by_rank)
    for name in ("loss", "grad_norm", "eval_perplexity"):
        first, *others = (read_metric(config, name) for config in configs.values())
        assert all(other == pytest.approx(first, rel=1e-4) for other in others), name
    assert read_metric(configs[1], "tokens") == read_metric(configs[4], "tokens")


def test_interrupted_run_resumes_bitwise(inputs: Path, tmp_path: Path) -> None:
    model = replace(make_config(inputs, tmp_path).model, zero_stage=2)
    full = make_config(inputs, tmp_path / "whole", model=model)
    run_ranks(train, full)
    out = tmp_path / "cut"
    shutil.copytree(full.output_dir, out)
    shutil.rmtree(out / "checkpoints" / "step_00000004")
    for name in ("result.json", "model.safetensors"):
        (out / name).unlink()

    run_ranks(train, replace(full, output_dir=out, resume=True))

    assert read_metrics(out) == read_metrics(full.output_dir)
    actual, expected = read_checkpoint(out, 4), read_checkpoint(full.output_dir, 4)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in actual)
    resumed, uninterrupted = (path / "model.safetensors" for path in (out, full.output_dir))
    assert resumed.read_bytes() == uninterrupted.read_bytes()
    pack_texts(inputs / "other", 50, seed=9)
    other = replace(full.data, path=(str(inputs / "other"),))
    (out / "result.json").unlink()
    with pytest.raises(ConfigError, match=r"was saved with data.path"):
        train(replace(full, output_dir=out, resume=True, data=other))


def test_megatron_files_train_like_a_packed_corpus(inputs: Path, tmp_path: Path) -> None:
    for suffix in ("bin", "idx"):  # Megatron's files
        shutil.copy(inputs / f"texts.{suffix}", tmp_path / f"m.{suffix}")

    def losses(name: str, path: Path) -> list[float]:
        config = make_config(inputs, tmp_path / name, max_steps=1)
        train(replace(config, data=replace(config.data, path=(str(path),))))
        return read_metric(config, "loss") + read_metric(config, "eval_perplexity")

    assert losses("prefix", tmp_path / "m") == losses("packed", inputs / "texts")
    assert losses("index", tmp_path / "m.idx") == losses("prefix", tmp_path / "m")


@pytest.mark.jobs
def test_warm_start_continues_with_adam_moments_on_other_rows(inputs: Path, tmp_path: Path) -> None:
    constant = OptimConfig(lr=0.003, schedule="constant", warmup_ratio=0.0)
    model = TrainedModelConfig(path=str(inputs / "base"), optim=constant)
    first = make_config(inputs, tmp_path / "first", model=model, max_steps=30, keep_best=False)
    train(first)
    data = replace(first.data, max_length=64, seed=3)
    warm = replace(
        first,
        output_dir=tmp_path / "warm",
        data=data,
        batch_size=12,
        seed=7,
        max_steps=8,
        warm_start=first.output_dir,
    )

    train(warm)

    first_losses, warm_losses = read_metric(first, "loss"), read_metric(warm, "loss")
    before = sum(first_losses[-8:]) / 8
    assert max(warm_losses) < before + 0.1 < first_losses[0] - 1.0  # no jump
    assert (
        read_checkpoint(warm.output_dir, 8).keys() == read_checkpoint(first.output_dir, 30).keys()
    )
    other_model = replace(model, path=str(save_base(tmp_path / "other", "gptj")))
    with pytest.raises(CheckpointError, match="but the model has"):
        train(replace(warm, output_dir=tmp_path / "refused", model=other_model))
    with pytest.raises(ConfigError, match=r"warm_start .*nowhere has no checkpoints"):
        train(replace(warm, output_dir=tmp_path / "refused", warm_start=tmp_path / "nowhere"))
