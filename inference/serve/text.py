"""The text of a response as its tokens come, cut before its first stop string.

What may be the beginning of a stop string is held back until it is decided. The pieces join to the
same text whether somebody reads them one by one or not, and that text is the bytes of the tokens;
of bytes that are no character, and of a character that does not end, it has U+FFFD.
"""

import codecs
from collections.abc import Sequence

from inference.serve.token_bytes import TokenBytes
from inference.streaming import TextStream


class ResponseText:
    """Turns the tokens of one response into pieces of text.

    Args:
        bytes_of: the tokens of the model.
        stops: texts before which the response ends; none is empty.
        begins: whether the text begins anew, so that its first word has no space in front where
            the tokenizer drops it.
    """

    def __init__(
        self,
        bytes_of: TokenBytes,
        stops: Sequence[str] = (),
        *,
        begins: bool = True,
    ) -> None:
        self._bytes_of = bytes_of
        self._begins = begins
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # What it makes of tokens is known by asking it alone.
        self._stream = None if bytes_of.is_exact else TextStream(bytes_of.tokenizer)
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False
        """Whether a stop string came: the response has ended, and more tokens have no text."""

    def add(self, token: int) -> str:
        """The text that is certain with one more token."""
        if self.stopped:
            return ""
        if self._stream is not None:
            return self._take(self._stream.add(token))
        (part,) = self._bytes_of.of_all([token], begins=self._begins)
        self._begins = self._begins and token in self._bytes_of.special
        return self._take(self._decoder.decode(part))

    def finish(self) -> str:
        """The rest, once no more tokens come."""
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
        """Characters at the end of `text` with which a stop string may begin."""
        longest = max(map(len, self._stops))
        for count in range(min(longest - 1, len(text)), 0, -1):
            end = text[-count:]
            if any(stop.startswith(end) for stop in self._stops):
                return count
        return 0
