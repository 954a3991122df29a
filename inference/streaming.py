"""Text from tokens as they come: whole characters only."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

INCOMPLETE = "\ufffd"
"""What tokenizers decode the bytes of an unfinished character to."""


@runtime_checkable
class Decoder(Protocol):
    """The one thing streaming asks of a tokenizer."""

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = ...,
        clean_up_tokenization_spaces: bool = ...,
    ) -> str | list[str]:
        """The text of `token_ids`."""
        ...


class TextStream:
    """Turns token ids into text piece by piece; the pieces join to the text of all of them.

    A token alone has no text: it may be part of a character, and some tokenizers drop the space of
    a first word. So each piece is what the last few tokens read with the new one, less what they
    read without it.
    """

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []

    def add(self, token_id: int) -> str:
        """The text that is certain now that `token_id` has come; often one word, maybe nothing."""
        self._pending.append(token_id)
        piece = self._piece()
        if not piece or piece.endswith(INCOMPLETE):
            return ""
        self._context, self._pending = self._pending, []
        return piece

    def finish(self) -> str:
        """What was held back, with U+FFFD where the answer ended inside a character."""
        piece = self._piece()
        self._context, self._pending = [], []
        return piece

    def _piece(self) -> str:
        return self._decode(self._context + self._pending)[len(self._decode(self._context)) :]

    def _decode(self, token_ids: list[int]) -> str:
        # The clean-up would take back spaces that are already printed.
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


def printable(text: str) -> str:
    """`text` without control characters, which could steer a terminal; newlines and tabs stay."""
    return "".join(
        char if char in "\n\t" or (char >= " " and not "\x7f" <= char <= "\x9f") else INCOMPLETE
        for char in text
    )
