"""Streaming of text from tokens."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from inference.text import TextStream

TEXT = "Grüße, 東京 🙂🏽!\n\n  two  spaces , and a dot ."


@pytest.fixture(scope="module")
def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer, in which most characters are several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["two spaces and a dot and a space"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def test_streamed_pieces_join_to_the_text(byte_level: PreTrainedTokenizerFast) -> None:
    ids = byte_level.encode(TEXT)
    stream = TextStream(byte_level)

    pieces = [stream.add(token_id) for token_id in ids]

    assert "".join(pieces) == TEXT
    assert stream.finish() == ""


def test_truncated_character_becomes_the_replacement_character(
    byte_level: PreTrainedTokenizerFast,
) -> None:
    stream = TextStream(byte_level)

    pieces = [stream.add(token_id) for token_id in byte_level.encode("a🙂")[:-1]]

    assert "".join(pieces) == "a"
    assert stream.finish() == "\ufffd"
