"""Text of streamed tokens: complete characters, without stop strings."""

import random
from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerBase

from inference.serve.http import to_json
from inference.text import ResponseText, TokenBytes, plain_text
from pipeline.demo.model import build_tokenizer
from tests.pipeline.data.tokenizers import KINDS

TEXT = "Grüße, 東京 🙂🏽! Hi there.\n\n  two  spaces , and a dot ."


def stream_pieces(text: ResponseText, ids: list[int]) -> list[str]:
    return [*(text.add(token) for token in ids), text.finish()]


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_streamed_text_matches_the_tokenizer(make: Callable[[], PreTrainedTokenizerBase]) -> None:
    tokenizer = make()
    ids = list(tokenizer(TEXT)["input_ids"])
    token_bytes = TokenBytes(tokenizer)

    pieces = stream_pieces(ResponseText(token_bytes), ids)

    text = plain_text(tokenizer, ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    tokens = ids[1:] if ids[0] in tokenizer.all_special_ids else ids
    assert b"".join(token_bytes.get_all(tokens, starts_text=True)).decode() == text


def test_incomplete_character_becomes_a_replacement_character() -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(["A", "<0xE2>", "▁B", "<0xE2>"])

    pieces = stream_pieces(ResponseText(TokenBytes(tokenizer)), ids)

    assert "".join(pieces) == plain_text(tokenizer, ids) == "A\ufffd B\ufffd"


def test_stop_string_never_appears_in_the_text() -> None:
    tokenizer = build_tokenizer()
    token_bytes = TokenBytes(tokenizer)
    rng = random.Random(2)
    num_stopped = 0
    for _ in range(400):
        text = "".join(rng.choice("ab \n€") for _ in range(30))
        stops = ["".join(rng.choice("ab \n€") for _ in range(n)) for n in (2, 3, 4)]
        # Each character as bytes, or as its own token if there is one.
        ids = [
            token
            for character in text
            for token in rng.choice(
                [
                    tokenizer(character, add_special_tokens=False)["input_ids"],
                    tokenizer.convert_tokens_to_ids([f"<0x{b:02X}>" for b in character.encode()]),
                ]
            )
        ]
        response = ResponseText(token_bytes, stops)

        pieces = stream_pieces(response, ids)

        stop_ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
        first = min(stop_ends, default=None)
        visible = text if first is None else text[:first]
        expected = visible[
            : min([visible.index(s) for s in stops if s in visible], default=len(text))
        ]
        assert "".join(pieces) == expected
        assert response.stopped == (first is not None)
        num_stopped += response.stopped
    assert num_stopped > 200


def test_json_is_compact_and_escapes_lone_surrogates() -> None:
    assert to_json({"é😀": ["\ud83d", 1]}) == '{"é😀":["\\ud83d",1]}'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(float("nan"))
