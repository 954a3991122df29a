"""Weights that are mapped from files at ZeRO stage 3 equal weights that are loaded in full."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from pipeline.config import LoraConfig, Precision, TrainedModelConfig
from pipeline.demo.model import VOCABULARY, build_tokenizer
from pipeline.engine.engine import Engine
from pipeline.models.forward.forward import Policy, Scorer, base_model
from pipeline.models.trained import prepare_causal_lm, prepare_classifier
from tests.distributed import run_ranks
from tests.families import save_to, tiny_causal_lm, tiny_classifier

CPU = torch.device("cpu")
LORA = LoraConfig(rank=4, alpha=8.0)
FAMILIES = ("opt", "gpt2", "llama")
BUILD: dict[str, tuple[Callable[..., nn.Module], Callable[[nn.Module], nn.Module]]] = {
    "causal": (prepare_causal_lm, Policy),
    "classifier": (prepare_classifier, Scorer),
}


def settings(path: str, **changes: Any) -> TrainedModelConfig:
    return TrainedModelConfig(path=path, zero_stage=3, **changes)


def make_engines(
    config: TrainedModelConfig, task: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[Engine, Engine]:
    """Return engines of a sharded model whose weights are mapped from files or loaded in full."""
    build, wrap = BUILD[task]
    mapped = build(config, tokenizer, device=CPU, seed=5)
    torch.rand(3)  # changes the random state
    full = build(replace(config, zero_stage=0), tokenizer, device=CPU, seed=5)
    return Engine(wrap(mapped), config, total_steps=1), Engine(wrap(full), config, total_steps=1)


def find_differences(first: Engine, second: Engine) -> list[str]:
    """Return the names of state that differs between two engines."""
    actual, expected = (
        base_model(cast("Policy | Scorer", engine.model).model) for engine in (first, second)
    )
    assert first.model.training == second.model.training
    assert actual.config.to_dict() == expected.config.to_dict()
    assert actual.name_or_path == expected.name_or_path
    if expected.can_generate():
        assert actual.generation_config.to_dict() == expected.generation_config.to_dict()
    assert len(first.groups) == len(second.groups)
    names = [
        f"master {index}"
        for index, (a, b) in enumerate(zip(first.masters(), second.masters(), strict=True))
        if not torch.equal(a, b)
    ]
    buffers = dict(second.model.named_buffers())
    assert dict(first.model.named_buffers()).keys() == buffers.keys()
    names += [n for n, x in first.model.named_buffers() if not torch.equal(x, buffers[n])]
    with first.gathered(), second.gathered():
        params = dict(second.model.named_parameters(remove_duplicate=False))
        mapped_params = dict(first.model.named_parameters(remove_duplicate=False))
        assert mapped_params.keys() == params.keys()
        for name, param in mapped_params.items():
            full_param = params[name]
            is_same = (
                param.dtype == full_param.dtype and param.requires_grad == full_param.requires_grad
            )
            if type(param) is not nn.Parameter or not is_same or not torch.equal(param, full_param):
                names.append(name)
    return names


def compare(cases: list[tuple[TrainedModelConfig, str, PreTrainedTokenizerBase]]) -> list[str]:
    return [
        f"{task} of {config.path}: {name}"
        for config, task, tokenizer in cases
        for name in find_differences(*make_engines(config, task, tokenizer))
    ]


def larger_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    return tokenizer


@pytest.mark.jobs
def test_models_mapped_from_files_equal_those_loaded_in_full(tmp_path: Path) -> None:
    cases: list[tuple[TrainedModelConfig, str, PreTrainedTokenizerBase]] = []
    for family in FAMILIES:
        untied, tied = (
            save_to(
                tiny_causal_lm(family, vocab_size=VOCABULARY, tie_word_embeddings=tie),
                tmp_path / f"{family} {tie}",
            )
            for tie in (False, True)
        )
        cases += [
            (settings(untied), "causal", larger_tokenizer()),
            (settings(untied, lora=LORA), "classifier", build_tokenizer()),
            (settings(tied), "causal", build_tokenizer()),
            (settings(tied, precision="bf16", lora=LORA), "causal", build_tokenizer()),
        ]
    tied = str(tmp_path / "llama True")
    cases.append((settings(tied, precision="bf16"), "causal", larger_tokenizer()))
    reward = save_to(tiny_classifier("llama", vocab_size=VOCABULARY), tmp_path / "reward")
    cases += [
        (settings(reward), "classifier", build_tokenizer()),
        (settings(reward, lora=LORA), "classifier", build_tokenizer()),
        (settings(reward), "classifier", larger_tokenizer()),
    ]

    for differences in run_ranks(compare, cases):
        assert not differences


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_are_memory_mapped_if_their_dtype_matches(
    precision: Precision, tmp_path: Path
) -> None:
    path = save_to(tiny_causal_lm("llama", vocab_size=VOCABULARY), tmp_path)

    model = prepare_causal_lm(
        settings(path, precision=precision), build_tokenizer(), device=CPU, seed=0
    )

    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines if "model.safetensors" in line]
    mapped = [(int(first, 16), int(end, 16)) for first, end in ranges]
    is_mapped = {
        any(first <= param.data_ptr() < end for first, end in mapped)
        for param in model.parameters()
    }
    assert is_mapped == {precision == "fp32"}
