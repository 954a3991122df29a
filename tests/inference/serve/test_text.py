"""Text of tokens as they come: whole characters, no stop string, the same however it is read."""

import random
from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerBase

from inference.serve.http import as_json
from inference.text import ResponseText, TokenBytes, plain_text
from pipeline.demo.model import build_tokenizer
from tests.pipeline.data.tokenizers import KINDS

TEXT = "Grüße, 東京 🙂🏽! Hi there.\n\n  two  spaces , and a dot ."


def pieces(text: ResponseText, ids: list[int]) -> list[str]:
    return [*(text.add(token) for token in ids), text.finish()]


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_the_text_of_real_tokens_is_what_their_tokenizer_decodes(
    make: Callable[[], PreTrainedTokenizerBase],
) -> None:
    tokenizer = make()
    ids = list(tokenizer(TEXT)["input_ids"])
    view_bytes = TokenBytes(tokenizer)

    found = pieces(ResponseText(view_bytes), ids)

    whole = plain_text(tokenizer, ids)
    assert "".join(found) == whole
    assert not any("\ufffd" in piece for piece in found)
    begins = ids[1:] if ids[0] in tokenizer.all_special_ids else ids
    assert b"".join(view_bytes.of_all(begins, begins=True)).decode() == whole


def test_a_stop_string_never_appears_however_tokens_divide_it() -> None:
    tokenizer = build_tokenizer()
    view_bytes = TokenBytes(tokenizer)
    chance = random.Random(2)
    cut = 0
    for _ in range(400):
        text = "".join(chance.choice("ab \n€") for _ in range(30))
        stops = ["".join(chance.choice("ab \n€") for _ in range(n)) for n in (2, 3, 4)]
        # Every character by its bytes, or by its piece where it has one.
        ids = [
            token
            for character in text
            for token in chance.choice(
                [
                    tokenizer(character, add_special_tokens=False)["input_ids"],
                    tokenizer.convert_tokens_to_ids([f"<0x{b:02X}>" for b in character.encode()]),
                ]
            )
        ]
        response = ResponseText(view_bytes, stops)

        found = pieces(response, ids)

        ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
        first = min(ends, default=None)
        seen = text if first is None else text[:first]
        expected = seen[: min([seen.index(s) for s in stops if s in seen], default=len(text))]
        assert "".join(found) == expected
        assert response.stopped == (first is not None)
        cut += response.stopped
    assert cut > 200


def test_json_is_compact_utf_8_in_which_a_lone_surrogate_is_escaped() -> None:
    assert as_json({"é😀": ["\ud83d", 1]}) == '{"é😀":["\\ud83d",1]}'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        as_json(float("nan"))
