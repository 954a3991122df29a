"""Step 1: perplexity, equal losses on two processes, and learning to stop."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from inference.generation import generate
from pipeline.config import (
    DataConfig,
    FrozenModelConfig,
    OptimConfig,
    TrainedModelConfig,
)
from pipeline.data.examples import Message
from pipeline.demo.model import VOCABULARY, build_tokenizer
from pipeline.demo.task import held_out_questions
from pipeline.engine.engine import Engine
from pipeline.models.forward.forward import Policy
from pipeline.models.hf.chat import load_chat
from pipeline.models.hf.load import load_causal_lm
from pipeline.models.passes import Passes
from pipeline.parallel.mesh import current_mesh
from step1_sft.batches import split_rows
from step1_sft.config import SFTConfig
from step1_sft.train import perplexity, train
from tests.distributed import run_ranks
from tests.families import random_rows, save_base, tiny_causal_lm
from tests.step3_ppo.toy import FEW
from tests.test_resume import read_metric

CPU = torch.device("cpu")


def small_task(directory: Path, **changes: Any) -> SFTConfig:
    """Return settings for a tiny random Llama and forty sums."""
    save_base(directory / "base")
    rows = [{"prompt": f"Add {n} and 1.", "response": f"It is {n + 1}."} for n in range(40)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    optim = OptimConfig(lr=0.003, schedule="constant", warmup_ratio=0.0)
    settings: dict[str, Any] = {
        "output_dir": directory / "out",
        "model": TrainedModelConfig(path=str(directory / "base"), optim=optim),
        "data": DataConfig(path=(str(directory / "rows.jsonl"),), max_length=48),
        "max_steps": 3,
        "batch_size": 8,
        "micro_batch_size": 8,
    }
    return SFTConfig(**{**settings, **changes})


@pytest.mark.parametrize("micro_batch_size", [1, 4])
@torch.no_grad()
def test_perplexity_is_the_exponential_of_the_mean_target_nll(
    tmp_path: Path, micro_batch_size: int
) -> None:
    config = small_task(tmp_path, micro_batch_size=micro_batch_size)
    plain = AutoModelForCausalLM.from_pretrained(config.model.path)
    rows = random_rows((9, 3, 14, 2, 6), prompt=2)
    engine = Engine(
        Policy(tiny_causal_lm("llama", vocab_size=VOCABULARY)), config.model, total_steps=1
    )

    actual = perplexity(Passes(engine), split_rows(rows, config))

    nll, count = 0.0, 0
    for row in rows:
        ids = torch.tensor([row.input_ids])
        # transformers ignores labels of -100.
        labels = torch.where(torch.tensor([row.trained]), ids, -100)
        if row.num_targets:
            nll += row.num_targets * plain(ids, labels=labels).loss.item()
            count += row.num_targets
    assert actual == pytest.approx(math.exp(nll / count), rel=1e-4)
    assert engine.model.training


def test_initial_weights_are_exported_if_training_did_not_improve_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = small_task(tmp_path)
    optim = OptimConfig(lr=9.0, schedule="constant", warmup_ratio=0.0)

    train(replace(config, model=replace(config.model, optim=optim)))

    (message,) = (text for text in caplog.messages if "did not improve the perplexity" in text)
    before, after = map(float, re.findall(r"([\d.e+]+) (?:before|after)", message))
    assert before < after
    assert "so the initial weights are exported; lower model.optim.lr (now 9)" in message


def train_losses(config: SFTConfig) -> list[float]:
    train(config)
    current_mesh().world.barrier()  # the first process writes the file that both read
    return read_metric(config, "loss") + read_metric(config, "eval_perplexity")


def test_losses_on_two_processes_match_one_process(tmp_path: Path) -> None:
    """With five rows per step the processes never have equally many."""
    expected = train_losses(small_task(tmp_path, batch_size=5, output_dir=tmp_path / "alone"))

    config = small_task(tmp_path, batch_size=5, output_dir=tmp_path / "together")
    first, second = run_ranks(train_losses, config)

    assert first == second == pytest.approx(expected, rel=1e-4)


@pytest.mark.jobs
def test_model_with_eos_as_padding_learns_to_stop(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    settings = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(settings).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    config = SFTConfig(
        output_dir=tmp_path / "out",
        model=TrainedModelConfig(path=str(tmp_path / "base"), optim=OptimConfig(lr=0.01)),
        data=replace(FEW, split=(1.0, 0.0, 0.0), max_length=64, max_eval_rows=16),
        max_steps=30,
        batch_size=32,
        micro_batch_size=32,
    )

    train(config)

    trained = FrozenModelConfig(path=str(config.output_dir))
    chat = load_chat(trained, DataConfig())
    responses = generate(
        load_causal_lm(trained, device=CPU),
        [chat.encode_prompt((Message("user", q.text),)) for q in held_out_questions()[::4]],
        max_new_tokens=48,
        temperature=1.0,
        stop_ids=chat.stop_ids,
        seed=0,
    )
    assert chat.tokenizer.pad_token_id == chat.tokenizer.eos_token_id
    assert sum(response.stopped for response in responses) / len(responses) > 0.95
