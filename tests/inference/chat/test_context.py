"""What fits into a model's context."""

from collections.abc import Sequence

import pytest

from inference.chat.conversation import fit_turns
from pipeline.data.examples import Message
from pipeline.errors import DataError

DIALOGUE = [
    Message("system", "s" * 5),
    Message("user", "a" * 10),
    Message("assistant", "b" * 10),
    Message("user", "c" * 10),
    Message("assistant", "d" * 10),
    Message("user", "e" * 10),
]


def characters(messages: Sequence[Message]) -> list[int]:
    return [ord(char) for message in messages for char in message.content]


@pytest.mark.parametrize(
    ("max_tokens", "text", "num_left_out"),
    [
        (55, "sssss" + "a" * 10 + "b" * 10 + "c" * 10 + "d" * 10 + "e" * 10, 0),
        (54, "sssss" + "c" * 10 + "d" * 10 + "e" * 10, 2),
        (35, "sssss" + "c" * 10 + "d" * 10 + "e" * 10, 2),
        (34, "sssss" + "e" * 10, 4),
    ],
)
def test_the_oldest_turns_go_first_as_whole_turns_and_the_system_message_stays(
    max_tokens: int, text: str, num_left_out: int
) -> None:
    token_ids, left_out = fit_turns(DIALOGUE, characters, max_tokens)

    assert "".join(map(chr, token_ids)) == text
    assert left_out == num_left_out


def test_a_message_that_alone_is_too_long_is_refused_with_both_numbers() -> None:
    with pytest.raises(DataError, match="has 15 tokens, and 14 fit"):
        fit_turns(DIALOGUE, characters, 14)
