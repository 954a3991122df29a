"""Loading: no dropout, heads of the right size, rows for new tokens, sentences for errors."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.config import FrozenModelConfig
from pipeline.data.batches import collate
from pipeline.demo.model import build_tokenizer
from pipeline.errors import ModelError
from pipeline.models.forward import Policy
from pipeline.models.load import (
    add_tokens,
    load_causal_lm,
    load_classifier,
    load_tokenizer,
)
from tests.families import FAMILIES, random_rows, saved, tiny_causal_lm

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_model_in_training_mode_has_no_dropout(family: str, tmp_path: Path) -> None:
    model = tiny_causal_lm(family)
    rates = [name for name in model.config.to_dict() if "drop" in name]
    model.config.update(dict.fromkeys(rates, 0.5))

    loaded = load_causal_lm(FrozenModelConfig(path=saved(model, tmp_path)), device=CPU).train()

    batch = collate(random_rows((9, 4, 7)))
    first, second = (Policy(loaded)(batch).logprobs for _ in range(2))
    assert torch.equal(first, second)


def test_a_new_head_is_drawn_with_the_standard_deviation_of_the_literature(tmp_path: Path) -> None:
    config = FrozenModelConfig(path=saved(tiny_causal_lm("llama", hidden_size=512), tmp_path))

    heads = [load_classifier(config, device=CPU, seed=seed).score.weight for seed in (1, 1, 2)]

    assert heads[0].shape == (1, 512)
    assert heads[0].std().item() == pytest.approx(513**-0.5, rel=0.1)
    assert abs(heads[0].mean().item()) < 3 * 513**-0.5 / 512**0.5
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_weights_begin_as_the_allocator_lays_tensors_whatever_the_files_header(
    tmp_path: Path,
) -> None:
    path = Path(saved(tiny_causal_lm("llama"), tmp_path)) / "model.safetensors"
    weights = load_file(path)
    for length in (1, 9, 17):  # of which at most one ends at a multiple of 64
        save_file(weights, path, metadata={"format": "pt", "filler": "-" * length})

        model = load_causal_lm(FrozenModelConfig(path=str(tmp_path)), device=CPU)

        assert {param.data_ptr() % 64 for param in model.parameters()} == {0}


def test_new_tokens_get_rows_that_depend_on_the_seed_alone() -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    models = [tiny_causal_lm("llama", vocab_size=len(tokenizer) - 2) for _ in range(3)]
    known = models[0].get_input_embeddings().weight.clone()

    for model, seed in zip(models, (1, 1, 2), strict=True):
        torch.rand(seed)  # other random numbers were drawn before
        add_tokens(model, tokenizer, seed=seed)

    first, again, other = (model.get_input_embeddings().weight for model in models)
    assert first.shape[0] == len(tokenizer)
    assert torch.equal(first[:-2], known)
    assert torch.equal(first, again)
    assert not torch.equal(first[-2:], other[-2:])


def test_a_tokenizer_without_a_padding_token_pads_with_the_end_of_sequence(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))

    loaded = load_tokenizer(FrozenModelConfig(path=str(tmp_path)))

    assert loaded.pad_token_id == loaded.eos_token_id


def test_a_pickle_is_loaded_only_where_the_user_allows_it(tmp_path: Path) -> None:
    model = tiny_causal_lm("llama")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")

    with pytest.raises(ModelError, match=r"pytorch_model\.bin, a pickle that can run code"):
        load_causal_lm(FrozenModelConfig(path=str(tmp_path)), device=CPU, seed=0)
    allowed = FrozenModelConfig(path=str(tmp_path), allow_pickle=True)
    loaded = load_causal_lm(allowed, device=CPU, seed=0)

    for name, param in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), param)


def test_a_pickle_that_runs_code_is_never_opened(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    tiny_causal_lm("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    attack = b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR."
    (tmp_path / "pytorch_model.bin").write_bytes(attack)

    for allowed in (False, True):
        with pytest.raises(ModelError):
            load_causal_lm(
                FrozenModelConfig(path=str(tmp_path), allow_pickle=allowed), device=CPU, seed=0
            )

    assert not canary.exists()
