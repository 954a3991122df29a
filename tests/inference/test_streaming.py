"""Streaming of text from tokens."""

from inference.text import TextStream
from tests.pipeline.data.tokenizers import byte_level

TEXT = "Grüße, 東京 🙂🏽!\n\n  two  spaces , and a dot ."


def test_streamed_pieces_join_to_the_text() -> None:
    stream = TextStream(byte_level())

    pieces = [stream.add(token_id) for token_id in byte_level().encode(TEXT)]

    assert "".join(pieces) == TEXT
    assert stream.finish() == ""


def test_truncated_character_becomes_the_replacement_character() -> None:
    stream = TextStream(byte_level())

    pieces = [stream.add(token_id) for token_id in byte_level().encode("a🙂")[:-1]]

    assert "".join(pieces) == "a"
    assert stream.finish() == "\ufffd"
