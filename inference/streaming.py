"""Text from tokens as they come: whole characters only."""

from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"
"""What tokenizers decode the bytes of an unfinished character to."""


class TextStream:
    """Turns token ids into text piece by piece; the pieces join to the text of all of them.

    A token alone has no text: it may be part of a character, and some tokenizers drop the space of
    a first word. So each piece is what the last few tokens read with the new one, less what they
    read without it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
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
        """What was held back, with U+FFFD where the response ended inside a character."""
        piece = self._piece()
        self._context, self._pending = [], []
        return piece

    def _piece(self) -> str:
        return continuation(self._tokenizer, self._context, self._pending)


def continuation(
    tokenizer: PreTrainedTokenizerBase, before: list[int], token_ids: list[int]
) -> str:
    """The text that `token_ids` add to the text of `before`."""
    return plain_text(tokenizer, before + token_ids)[len(plain_text(tokenizer, before)) :]


def plain_text(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    """The text of `token_ids`, without special tokens."""
    # The clean-up would take back spaces that are already printed.
    text = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def printable(text: str) -> str:
    """`text` without control characters, which could steer a terminal; newlines and tabs stay."""
    return "".join(
        char if char in "\n\t" or (char >= " " and not "\x7f" <= char <= "\x9f") else INCOMPLETE
        for char in text
    )
