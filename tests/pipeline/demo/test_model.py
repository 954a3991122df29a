from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from pipeline.demo.model import build_model, build_tokenizer
from pipeline.demo.task import corpus

UNSEEN = "Zürich\tis 12°C — 你好 🙂 \n\n\n  two  spaces, <b>\u2581 1234567"


@pytest.mark.parametrize("with_model", [False, True])
def test_saved_tokenizer_loads_with_the_same_ids(tmp_path: Path, with_model: bool) -> None:
    tokenizer = build_tokenizer()
    texts = [*corpus()[::97], UNSEEN]
    tokenizer.save_pretrained(tmp_path)
    if with_model:
        build_model(vocab_size=len(tokenizer), seed=1).config.save_pretrained(tmp_path)

    loaded = AutoTokenizer.from_pretrained(tmp_path)

    assert loaded(texts)["input_ids"] == tokenizer(texts)["input_ids"]
    assert loaded.all_special_ids == tokenizer.all_special_ids
    assert loaded.batch_decode(loaded(texts)["input_ids"]) == tokenizer.batch_decode(
        tokenizer(texts)["input_ids"]
    )


def test_model_has_a_million_parameters_and_the_tokenizer_ids() -> None:
    tokenizer = build_tokenizer()

    model = build_model(vocab_size=len(tokenizer), seed=1)

    assert 950_000 < model.num_parameters() < 1_050_000
    assert (model.config.bos_token_id, model.config.eos_token_id) == (1, 2)
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_weights_depend_only_on_the_seed_not_the_global_rng() -> None:
    state = torch.get_rng_state()

    first = build_model(vocab_size=64, seed=1).state_dict()
    torch.rand(3)
    repeated = build_model(vocab_size=64, seed=1).state_dict()
    other = build_model(vocab_size=64, seed=2).state_dict()
    torch.set_rng_state(state)
    build_model(vocab_size=64, seed=1)

    assert all(torch.equal(first[name], repeated[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert torch.equal(torch.get_rng_state(), state)
