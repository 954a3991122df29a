"""Guided output: the tokens that keep a response within a JSON schema or a regular expression.

`llguidance`, of the extra `guide`, keeps a parser for each response and says which tokens it can go
on with. Its tokens are the bytes that ours add to a text, so what it parses is the response's text.
"""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool

from inference.serve.errors import ApiError
from inference.serve.response_format import Grammar
from inference.serve.token_bytes import TokenBytes
from pipeline.data.continuation import continuation_encoder

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

SPACE = r"[ \t\n\r]{1,40}"
"""White space of JSON between two tokens of it: without a bound a response may be nothing else."""


class GuideError(Exception):
    """A response can't go on within its grammar."""


class Guides:
    """The guides of one model.

    Args:
        name: of the model, for sentences.
        bytes_of: its tokens.
        vocabulary: tokens that it knows.
        stop_ids: tokens that end a response.
    """

    def __init__(
        self, name: str, bytes_of: TokenBytes, *, vocabulary: int, stop_ids: Sequence[int]
    ) -> None:
        self._name = name
        self._bytes_of = bytes_of
        self._vocabulary = vocabulary
        self._stop_ids = list(stop_ids)
        self._one_at_a_time = threading.Lock()
        """Compiling takes memory within its limits, and much of it twice is twice as much."""
        self._tokens: LLTokenizer | None = None
        self._shortened: Bool[np.ndarray, " V"] | None = None
        """Tokens that lose a space where a text begins with them."""

    def compile(self, grammar: Grammar, *, begins: bool) -> "CompiledGrammar":
        """The grammar, ready for responses; takes milliseconds, the first one of a model more.

        Args:
            grammar: of the request.
            begins: whether a response begins its text, rather than going on with the prompt's.

        Raises:
            ApiError: it is none, needs more than the limits, or there is no llguidance.
        """
        field = grammar.field
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise ApiError(
                400,
                f"{field} needs llguidance on the server: pip install 'rlhf-pipeline[guide]'",
                param=field,
            ) from None
        if not self._bytes_of.is_exact:
            raise ApiError(
                400,
                f"{field} needs a tokenizer of bytes, which {self._name} has not; leave it out",
                param=field,
            )
        with self._one_at_a_time:
            if self._tokens is None:
                self._tokens = self._read_tokens()
            try:
                matcher = LLMatcher(self._tokens, _source(grammar), log_level=0, limits=_limits())
                found = CompiledGrammar(matcher, self._vocabulary, self._dropped(begins=begins))
                found.check()
            except (GuideError, ValueError) as error:
                reason = _sentence(str(error))
                raise ApiError(400, f"{field} can't guide: {reason}", param=field) from None
        return found

    def _dropped(self, *, begins: bool) -> Bool[np.ndarray, " V"] | None:
        """Tokens that a response can't begin with, as its text would be another than theirs."""
        if not begins:
            return None
        if self._shortened is None:
            of = self._bytes_of
            count = min(self._vocabulary, len(of.tokenizer))
            self._shortened = np.zeros(self._vocabulary, dtype=bool)
            for token in range(count):
                if of.of(token)[:1] == b" ":
                    self._shortened[token] = of.of_all([token], begins=True) != [of.of(token)]
        return self._shortened

    def _read_tokens(self) -> "LLTokenizer":
        from llguidance import LLTokenizer, TokenizerWrapper

        vocabulary = _Vocabulary(self._bytes_of, self._vocabulary, self._stop_ids)
        return LLTokenizer(
            TokenizerWrapper(vocabulary), n_vocab=self._vocabulary, eos_token=self._stop_ids
        )


class _Vocabulary:
    """The tokens of a model as llguidance asks for them."""

    def __init__(self, bytes_of: TokenBytes, count: int, stop_ids: Sequence[int]) -> None:
        # What a grammar leaves no choice of is encoded, and no space may come before it.
        self._encode = continuation_encoder(bytes_of.tokenizer)
        self.eos_token_id = stop_ids[0]
        self.bos_token_id = None
        self.tokens = [bytes_of.of(token) for token in range(count)]
        self._ids = {part: token for token, part in enumerate(self.tokens) if part}
        self.special_token_ids = sorted(each for each in bytes_of.special if each < count)

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # it tries bytes first
            raise TypeError("a text is wanted")
        data = text.encode()
        ids = list(self._encode(text))
        if b"".join(self.tokens[token] for token in ids) == data:
            return ids
        return self._longest_first(data)  # as where a tokenizer normalizes texts

    def _longest_first(self, data: bytes) -> list[int]:
        """The longest token that fits at each place; no tokens where there is none."""
        ids: list[int] = []
        while data:
            lengths = range(min(len(data), max(map(len, self._ids))), 0, -1)
            length = next((each for each in lengths if data[:each] in self._ids), 0)
            if not length:
                return []
            ids.append(self._ids[data[:length]])
            data = data[length:]
        return ids


class CompiledGrammar:
    """A grammar that responses can be guided by."""

    def __init__(
        self,
        matcher: "LLMatcher",
        vocabulary: int,
        dropped: Bool[np.ndarray, " V"] | None,
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._dropped = dropped

    def check(self) -> None:
        """Take a first step, as some grammars show only then that they are too large.

        Raises:
            GuideError: the grammar is wrong or too large, or no response can begin.
        """
        first = self.guide()([])
        self.guide()([int(first.argmax())])

    def guide(self) -> "RowGuide":
        """The guide of a new response."""
        return RowGuide(self._matcher.deep_copy(), self._vocabulary, self._dropped)


class RowGuide:
    """Keeps one response within its grammar; a token that ends it is the only one at its end."""

    def __init__(
        self, matcher: "LLMatcher", vocabulary: int, dropped: Bool[np.ndarray, " V"] | None
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._dropped = dropped
        self._num_read = 0

    def __call__(self, response: Sequence[int]) -> Bool[np.ndarray, " V"]:
        """Which tokens may follow.

        Raises:
            GuideError: none, or the grammar needs more than its limits here.
        """
        self._matcher.consume_tokens(list(response[self._num_read :]))
        self._num_read = len(response)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise GuideError(self._matcher.get_error())
        mask = np.unpackbits(bits, count=self._vocabulary, bitorder="little").astype(bool)
        if not response and self._dropped is not None:
            mask &= ~self._dropped
        if not mask.any():
            raise GuideError("no token goes on with it")
        return mask


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own form."""
    from llguidance import LLMatcher

    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_json_schema(
        grammar.text, overrides={"whitespace_pattern": SPACE, "whitespace_flexible": True}
    )


def _limits() -> "LLParserLimits":
    """A tenth of llguidance's own: about 10 milliseconds to compile, and 2 for a step."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=100_000,
        step_lexer_fuel=20_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_grammar_size=50_000,
        verbose_errors=False,  # they have parts of texts, and go into the log
    )


def _sentence(message: str) -> str:
    """What is wrong, without the place in the grammar's own form."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it is empty"])[-1 if errors else 0][:200]
