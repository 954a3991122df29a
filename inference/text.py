"""Incremental decoding: complete characters, stop strings, and bytes of tokens."""

import codecs
import json
import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

INCOMPLETE = "\ufffd"
"""Replacement character, to which the bytes of an incomplete character are decoded."""


class TextStream:
    """Turns token ids into text piece by piece; the pieces concatenate to the full text.

    A single token can't be decoded alone: it may be part of a character, and some tokenizers drop
    the space before the first word. The last few tokens are therefore decoded with and without the
    new one, and the difference is the piece.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []

    def add(self, token_id: int) -> str:
        """Return the text that `token_id` completes: often one word, possibly nothing."""
        self._pending.append(token_id)
        piece = self._decode_pending()
        if not piece or piece.endswith(INCOMPLETE):
            return ""
        self._context, self._pending = self._pending, []
        return piece

    def finish(self) -> str:
        """Return the remaining text, with U+FFFD if the response ended inside a character."""
        piece = self._decode_pending()
        self._context, self._pending = [], []
        return piece

    def _decode_pending(self) -> str:
        return continuation(self._tokenizer, self._context, self._pending)


def continuation(
    tokenizer: PreTrainedTokenizerBase, before: list[int], token_ids: list[int]
) -> str:
    """Return the text that `token_ids` add to the text of `before`."""
    return plain_text(tokenizer, before + token_ids)[len(plain_text(tokenizer, before)) :]


def plain_text(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    """Return the text of `token_ids`, without special tokens."""
    # The clean-up would remove spaces that have already been printed.
    text = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def encode_text(
    tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = True
) -> list[int]:
    """Return the text's token ids; `special` adds special tokens unless BOS begins the text."""
    bos_token = tokenizer.bos_token
    special = special and not (bos_token and text.startswith(str(bos_token)))
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def printable(text: str) -> str:
    """Replace control characters, which could manipulate a terminal, except newlines and tabs."""
    return "".join(
        char if char in "\n\t" or (char >= " " and not "\x7f" <= char <= "\x9f") else INCOMPLETE
        for char in text
    )


_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
METASPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class TokenBytes:
    """Bytes of tokens; exact if the tokenizer's decoder is byte-level or has byte tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self.special = {*tokenizer.all_special_ids, *(i for i, token in added if token.special)}
        """Special tokens, which have no text."""
        decoder_types = set(_decoder_types(tokenizer))
        self._is_byte_level = "ByteLevel" in decoder_types
        self._has_byte_pieces = "ByteFallback" in decoder_types
        self.is_exact = self._is_byte_level or self._has_byte_pieces
        """Whether the concatenated bytes of tokens are the bytes of their text."""
        self._cache: dict[int, bytes] = {}
        self._char_to_byte = {character: byte for byte, character in bytes_to_unicode().items()}

    def get(self, token: int) -> bytes:
        """Return the bytes that a token adds to text; special and unknown tokens add none."""
        if token not in self._cache:
            self._cache[token] = self._decode(token)
        return self._cache[token]

    def _decode(self, token: int) -> bytes:
        if token in self.special or token >= len(self.tokenizer):
            return b""
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if self._is_byte_level and isinstance(piece, str):
            if set(piece) <= self._char_to_byte.keys():
                return bytes(self._char_to_byte[character] for character in piece)
            return piece.encode()  # an added token is plain text
        if self._has_byte_pieces and isinstance(piece, str):
            match = _BYTE.fullmatch(piece)
            return bytes([int(match[1], 16)]) if match else piece.replace(METASPACE, " ").encode()
        return plain_text(self.tokenizer, [token]).encode()

    def name(self, token: int) -> str:
        """Return the text of a token, or the name of a special token."""
        if token in self.special:
            return str(self.tokenizer.convert_ids_to_tokens(token))
        return self.get(token).decode(errors="replace")

    def get_all(self, tokens: Sequence[int], *, starts_text: bool) -> list[bytes]:
        """Return the bytes of each token, without a leading space that decoding the text drops."""
        parts = [self.get(token) for token in tokens]
        first = next((i for i, token in enumerate(tokens) if token not in self.special), None)
        if starts_text and first is not None and parts[first][:1] == b" ":
            text = plain_text(self.tokenizer, [tokens[first]])
            if not text.startswith(" "):
                parts[first] = parts[first][1:]
        return parts


def _decoder_types(tokenizer: PreTrainedTokenizerBase) -> Sequence[str]:
    """Return the types of the decoders that a fast tokenizer applies."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return ()
    state = json.loads(backend.decoder.__getstate__())
    parts = state.get("decoders", [state])
    return [str(part.get("type")) for part in parts]


class ResponseText:
    """Turns the tokens of one response into text pieces.

    Args:
        token_bytes: bytes of the model's tokens.
        stops: stop strings, before which the response ends; none is empty.
        starts_text: whether the response starts a text, whose first word may lose its space.
    """

    def __init__(
        self, token_bytes: TokenBytes, stops: Sequence[str] = (), *, starts_text: bool = True
    ) -> None:
        self._token_bytes = token_bytes
        self._starts_text = starts_text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # Without exact bytes per token, only the tokenizer can decode them.
        self._stream = None if token_bytes.is_exact else TextStream(token_bytes.tokenizer)
        self._stops = tuple(stops)
        self._pending = ""
        self.stopped = False
        """Whether a stop string ended the response; later tokens have no text."""

    def add(self, token: int) -> str:
        """Return the text that a token completes."""
        if self.stopped:
            return ""
        if self._stream is not None:
            return self._cut_at_stop(self._stream.add(token))
        (part,) = self._token_bytes.get_all([token], starts_text=self._starts_text)
        self._starts_text = self._starts_text and token in self._token_bytes.special
        return self._cut_at_stop(self._decoder.decode(part))

    def finish(self) -> str:
        """Return the rest of the text."""
        if self.stopped:
            return ""
        remaining = self._stream.finish() if self._stream else self._decoder.decode(b"", final=True)
        piece = self._cut_at_stop(remaining)
        rest, self._pending = self._pending, ""
        return piece if self.stopped else piece + rest

    def _cut_at_stop(self, piece: str) -> str:
        if not self._stops:
            return piece
        text = self._pending + piece
        ends = [index for stop in self._stops if (index := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._pending = True, ""
            return text[: min(ends)]
        end = len(text) - self._partial_stop_length(text)
        self._pending = text[end:]
        return text[:end]

    def _partial_stop_length(self, text: str) -> int:
        """Return the number of characters at the end of `text` that may begin a stop string."""
        longest = min(max(map(len, self._stops)) - 1, len(text))
        suffixes = (text[-count:] for count in range(longest, 0, -1))
        return next((len(s) for s in suffixes if any(x.startswith(s) for x in self._stops)), 0)
