"""A vocabulary that is had without PyTorch is that of the tokenizer that training loads."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.config import FrozenModelConfig
from pipeline.data.store.encode import make_encoder
from pipeline.data.store.vocabulary import vocabulary_of
from pipeline.errors import ModelError
from pipeline.models.load import load_tokenizer
from pipeline.models.store_vocabulary import GENERIC, TRUSTED, generic_vocabulary, load_vocabulary

TEXTS = ["Wer wagt es, Rittersmann oder Knapp, zu tauchen in diesen Schlund? <|end|>"] * 3


def write(directory: Path, family: str, **settings: Any) -> str:
    """A byte-level BPE with a special token of its own and one that the settings add."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"])
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    added = {"content": "<|turn|>", "special": True, "lstrip": False, "rstrip": False}
    known = {
        "eos_token": "<|end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(tokenizer.get_vocab_size()): added},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps({**known, **settings}))
    (directory / "config.json").write_text(json.dumps({"model_type": family}))
    return str(directory)


def in_full(path: str) -> Any:
    return vocabulary_of(load_tokenizer(FrozenModelConfig(path=path)), path)


@pytest.mark.parametrize("family", TRUSTED)
def test_of_families_whose_class_is_believed_it_is_the_same(family: str, tmp_path: Path) -> None:
    for name in GENERIC:
        path = write(tmp_path, family, tokenizer_class=name)

        found = generic_vocabulary(path)

        assert found == in_full(path)
        assert found is not None
        tokenizer = load_tokenizer(FrozenModelConfig(path=path))
        text = f"Knapp<|turn|> {TEXTS[0]}"
        ids = make_encoder(found.definition).encode(text, add_special_tokens=False).ids
        expected: Any = tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        assert ids == expected["input_ids"]


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"tokenizer_class": "LlamaTokenizer"}),
        ("llama", {"tokenizer_class": None}),
        ("qwen2", {}),  # of which transformers knows better than the directory
    ],
)
def test_any_other_is_loaded_in_full(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, family, **settings)

    assert generic_vocabulary(path) is None
    assert load_vocabulary(path) == in_full(path)


def test_without_a_token_that_ends_the_sentence_is_that_of_training(tmp_path: Path) -> None:
    path = write(tmp_path, "llama", eos_token=None)

    with pytest.raises(ModelError, match="has no end-of-sequence token; set eos_token"):
        load_vocabulary(path)


@pytest.mark.jobs
def test_pytorch_is_not_imported(tmp_path: Path) -> None:
    program = (
        "import sys; from pipeline.models.store_vocabulary import load_vocabulary;"
        "load_vocabulary(sys.argv[1]); print('torch' in sys.modules)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program, write(tmp_path, "llama")],
        check=True, capture_output=True, text=True,
    )  # fmt: skip

    assert done.stdout.split() == ["False"]
