"""Incremental text of tokens: complete characters, stop strings, bytes of tokens."""

import codecs
import json
import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

INCOMPLETE = "\ufffd"
"""Decoded text of the bytes of an unfinished character."""


class TextStream:
    """Turns token ids into text piece by piece; the pieces concatenate to the full text.

    A single token can't be decoded: it may be part of a character, and some tokenizers drop the
    space before the first word. So the last few tokens are decoded with and without the new one,
    and the difference is the piece.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []

    def add(self, token_id: int) -> str:
        """Return the text that `token_id` completes; often one word, possibly none."""
        self._pending.append(token_id)
        piece = self._piece()
        if not piece or piece.endswith(INCOMPLETE):
            return ""
        self._context, self._pending = self._pending, []
        return piece

    def finish(self) -> str:
        """Return the remaining text, with U+FFFD if the response ended inside a character."""
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
    # The clean-up would remove spaces that are already printed.
    text = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def printable(text: str) -> str:
    """`text` without control characters, which could steer a terminal; newlines and tabs stay."""
    return "".join(
        char if char in "\n\t" or (char >= " " and not "\x7f" <= char <= "\x9f") else INCOMPLETE
        for char in text
    )


_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
METASPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class TokenBytes:
    """Bytes of a tokenizer's tokens; exact if its decoder is byte-level or has byte pieces."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self.special = {*tokenizer.all_special_ids, *(i for i, each in added if each.special)}
        """Special tokens, which have no text."""
        kinds = set(_decoders(tokenizer))
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_pieces = "ByteFallback" in kinds
        self.is_exact = self._is_byte_level or self._has_byte_pieces
        """Whether the concatenated bytes of tokens are the bytes of their text."""
        self._known: dict[int, bytes] = {}
        self._bytes = {character: byte for byte, character in bytes_to_unicode().items()}

    def of(self, token: int) -> bytes:
        """Return the bytes that a token adds to text; empty for a special or unknown token."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._read(token)
        return found

    def _read(self, token: int) -> bytes:
        if token in self.special or token >= len(self.tokenizer):
            return b""
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if self._is_byte_level and isinstance(piece, str):
            if set(piece) <= self._bytes.keys():
                return bytes(self._bytes[character] for character in piece)
            return piece.encode()  # an added token is plain text
        if self._has_byte_pieces and isinstance(piece, str):
            found = _BYTE.fullmatch(piece)
            return bytes([int(found[1], 16)]) if found else piece.replace(METASPACE, " ").encode()
        return plain_text(self.tokenizer, [token]).encode()

    def name(self, token: int) -> str:
        """Text of a token, or the name of a special token."""
        if token in self.special:
            return str(self.tokenizer.convert_ids_to_tokens(token))
        return self.of(token).decode(errors="replace")

    def of_all(self, tokens: Sequence[int], *, begins: bool) -> list[bytes]:
        """Bytes of each token; at the start of a text, without the space that decoding drops."""
        parts = [self.of(token) for token in tokens]
        first = next((at for at, token in enumerate(tokens) if token not in self.special), None)
        if begins and first is not None and parts[first][:1] == b" ":
            text = plain_text(self.tokenizer, [tokens[first]])
            if not text.startswith(" "):
                parts[first] = parts[first][1:]
        return parts


def _decoders(tokenizer: PreTrainedTokenizerBase) -> Sequence[str]:
    """Types of the decoders that a fast tokenizer applies."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return ()
    state = json.loads(backend.decoder.__getstate__())
    parts = state.get("decoders", [state])
    return [str(part.get("type")) for part in parts]


class ResponseText:
    """Turns the tokens of one response into text pieces.

    Args:
        view_bytes: bytes of the model's tokens.
        stops: stop strings, before which the response ends; none is empty.
        begins: whether the response begins a new text, without the leading space of its first
            word if the tokenizer drops it.
    """

    def __init__(
        self, view_bytes: TokenBytes, stops: Sequence[str] = (), *, begins: bool = True
    ) -> None:
        self._bytes_of = view_bytes
        self._begins = begins
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # Without exact bytes per token, only the tokenizer can decode them.
        self._stream = None if view_bytes.is_exact else TextStream(view_bytes.tokenizer)
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False
        """Whether a stop string ended the response; later tokens have no text."""

    def add(self, token: int) -> str:
        """Return the text that a token completes."""
        if self.stopped:
            return ""
        if self._stream is not None:
            return self._take(self._stream.add(token))
        (part,) = self._bytes_of.of_all([token], begins=self._begins)
        self._begins = self._begins and token in self._bytes_of.special
        return self._take(self._decoder.decode(part))

    def finish(self) -> str:
        """Return the rest of the text."""
        if self.stopped:
            return ""
        last = self._stream.finish() if self._stream else self._decoder.decode(b"", final=True)
        piece = self._take(last)
        rest, self._held = self._held, ""
        return piece if self.stopped else piece + rest

    def _take(self, piece: str) -> str:
        if not self._stops:
            return piece
        text = self._held + piece
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        certain = len(text) - self._may_begin(text)
        self._held = text[certain:]
        return text[:certain]

    def _may_begin(self, text: str) -> int:
        """The number of characters at the end of `text` that may begin a stop string."""
        longest = min(max(map(len, self._stops)) - 1, len(text))
        ends = (text[-count:] for count in range(longest, 0, -1))
        return next((len(end) for end in ends if any(s.startswith(end) for s in self._stops)), 0)
