"""Step 0: what it learns, that it is the same however it is cut, and what it begins with."""

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
from tests.families import tiny_causal_lm
from tests.pipeline.data.store.corpus import write_rows
from tests.test_resume import read_checkpoint, read_metrics

WORDS = ["sun", "moon", "rain", "wind", "bread", "water", "stone", "river", "cloud", "night"]


def pack_texts(out: Path, count: int, *, seed: int = 0) -> None:
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(3, 90))) for _ in range(count)]
    source = out.with_suffix(".jsonl")
    write_rows(source, texts)
    pack([source], read_vocabulary(build_tokenizer(), "embedded"), out)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama and two hundred packed texts."""
    directory = tmp_path_factory.mktemp("start")
    tokenizer = build_tokenizer()
    tiny_causal_lm("llama", vocab_size=len(tokenizer)).save_pretrained(directory / "base")
    tokenizer.save_pretrained(directory / "base")
    pack_texts(directory / "texts", 200)
    return directory


def small(start: Path, out: Path, **changes: Any) -> PretrainConfig:
    optim = OptimConfig(lr=0.003, warmup_steps=2)
    settings: dict[str, Any] = {
        "output_dir": out,
        "model": TrainedModelConfig(path=str(start / "base"), optim=optim),
        "data": TextDataConfig(
            path=(str(start / "texts"),), max_length=48, max_eval_rows=8, eval_fraction=0.1
        ),
        "max_steps": 4,
        "batch_size": 8,
        "micro_batch_size": 4,
        "save_every": 2,
        "eval_every": 2,
    }
    return PretrainConfig(**{**settings, **changes})


def result(config: PretrainConfig) -> dict[str, Any]:
    return json.loads((config.output_dir / "result.json").read_text())["eval"]


def logged(config: PretrainConfig, name: str) -> list[float]:
    lines = (config.output_dir / "metrics.jsonl").read_text().splitlines()
    return [record[name] for line in lines if name in (record := json.loads(line))]


@torch.no_grad()
def plain_perplexity(path: Path, rows: Sequence[TokenRow]) -> float:
    """By transformers alone, a sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(path)
    nll, count = 0.0, 0
    for row in rows:
        for ids in row.sequences():
            if len(ids) > 1:
                labels = torch.tensor([ids.tolist()])
                nll += (len(ids) - 1) * model(labels, labels=labels).loss.item()
                count += len(ids) - 1
    return math.exp(nll / count)


def test_it_learns_every_token_and_reports_what_transformers_finds(
    start: Path, tmp_path: Path
) -> None:
    config = small(start, tmp_path / "out", max_steps=12, eval_every=None)

    train(config)

    rows = load_rows(config, build_tokenizer())
    held_out = rows.corpus.eval_rows
    begins = {
        int(ids[0])
        for row in held_out
        for span, ids in zip(row.spans, row.sequences(), strict=True)
        if span.is_first
    }
    assert begins == {build_tokenizer().bos_token_id}
    figures = result(config)
    assert figures["perplexity_before"] == pytest.approx(
        plain_perplexity(start / "base", held_out), rel=1e-4
    )
    assert figures["perplexity_after"] == pytest.approx(
        plain_perplexity(config.output_dir, held_out), rel=1e-4
    )
    assert figures["perplexity_after"] < 0.5 * figures["perplexity_before"]
    is_held_out = rows.corpus.held_out.contains
    batches = [rows.corpus.next_rows() for _ in range(12)]
    kept = [[row.without(is_held_out) for row in batch] for batch in batches]
    tokens = [sum(map(len, batch)) for batch in kept]
    assert logged(config, "tokens") == tokens
    assert sum(tokens) < sum(len(row) for batch in batches for row in batch)
    assert logged(config, "loss")[0] == pytest.approx(
        math.log(plain_perplexity(start / "base", kept[0])), rel=1e-4
    )


def rows_seen(config: PretrainConfig) -> list[list[tuple[int, ...]]]:
    """Of each global batch the spans of its rows, as this process has them."""
    rows = load_rows(config, build_tokenizer())
    batches = [rows.corpus.next_rows() for _ in range(6)]
    return [[each.spans[0].start for each in batch] for batch in batches]


def run_and_see(config: PretrainConfig) -> list[list[tuple[int, ...]]]:
    train(config)
    return rows_seen(config)


@pytest.mark.jobs
def test_any_number_of_processes_has_the_same_order_and_the_same_losses(
    start: Path, tmp_path: Path
) -> None:
    configs = {n: small(start, tmp_path / f"{n}") for n in (1, 4)}

    orders = {
        n: run_ranks(run_and_see, config, world_size=n) if n > 1 else [run_and_see(config)]
        for n, config in configs.items()
    }

    assert all(order == orders[1][0] for each in orders.values() for order in each)
    for name in ("loss", "grad_norm", "eval_perplexity"):
        first, *others = (logged(config, name) for config in configs.values())
        assert all(other == pytest.approx(first, rel=1e-4) for other in others), name
    assert logged(configs[1], "tokens") == logged(configs[4], "tokens")


def test_a_run_that_was_cut_off_goes_on_to_the_bit(start: Path, tmp_path: Path) -> None:
    model = replace(small(start, tmp_path).model, zero_stage=2)
    whole = small(start, tmp_path / "whole", model=model)
    run_ranks(train, whole)
    out = tmp_path / "cut"
    shutil.copytree(whole.output_dir, out)
    shutil.rmtree(out / "checkpoints" / "step_00000004")
    for name in ("result.json", "model.safetensors"):
        (out / name).unlink()

    run_ranks(train, replace(whole, output_dir=out, resume=True))

    assert read_metrics(out) == read_metrics(whole.output_dir)
    ours, theirs = read_checkpoint(out, 4), read_checkpoint(whole.output_dir, 4)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    again, once = (at / "model.safetensors" for at in (out, whole.output_dir))
    assert again.read_bytes() == once.read_bytes()
    pack_texts(start / "other", 50, seed=9)
    other = replace(whole.data, path=(str(start / "other"),))
    (out / "result.json").unlink()
    with pytest.raises(ConfigError, match=r"was saved with data.path"):
        train(replace(whole, output_dir=out, resume=True, data=other))


def test_a_file_without_a_description_is_the_same_corpus(start: Path, tmp_path: Path) -> None:
    for suffix in ("bin", "idx"):  # as Megatron writes them
        shutil.copy(start / f"texts.{suffix}", tmp_path / f"m.{suffix}")

    def losses(name: str, path: Path) -> list[float]:
        config = small(start, tmp_path / name, max_steps=1)
        train(replace(config, data=replace(config.data, path=(str(path),))))
        return logged(config, "loss") + logged(config, "eval_perplexity")

    assert losses("prefix", tmp_path / "m") == losses("packed", start / "texts")
    assert losses("index", tmp_path / "m.idx") == losses("prefix", tmp_path / "m")


@pytest.mark.jobs
def test_a_warm_start_goes_on_with_the_moments_on_other_rows(start: Path, tmp_path: Path) -> None:
    constant = OptimConfig(lr=0.003, schedule="constant", warmup_ratio=0.0)
    model = TrainedModelConfig(path=str(start / "base"), optim=constant)
    first = small(start, tmp_path / "first", model=model, max_steps=30, keep_best=False)
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

    begun, went_on = logged(first, "loss"), logged(warm, "loss")
    ahead = sum(begun[-8:]) / 8
    assert max(went_on) < ahead + 0.1 < begun[0] - 1.0  # no jump, of a curve that fell by far
    assert (
        read_checkpoint(warm.output_dir, 8).keys() == read_checkpoint(first.output_dir, 30).keys()
    )
    tiny_causal_lm("gptj", vocab_size=len(build_tokenizer())).save_pretrained(tmp_path / "other")
    build_tokenizer().save_pretrained(tmp_path / "other")
    of_other = replace(model, path=str(tmp_path / "other"))
    with pytest.raises(CheckpointError, match="but the model has"):
        train(replace(warm, output_dir=tmp_path / "refused", model=of_other))
    with pytest.raises(ConfigError, match=r"warm_start .*nowhere has no checkpoints"):
        train(replace(warm, output_dir=tmp_path / "refused", warm_start=tmp_path / "nowhere"))
