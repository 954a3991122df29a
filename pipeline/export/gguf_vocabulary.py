"""The vocabulary of a GGUF file, and the tokenizer built from its fields alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

if TYPE_CHECKING:
    from gguf import GGUFReader

STOPS = ("eos", "eot", "eom")
"""Kinds of tokens at which llama.cpp ends a response."""

ROPE_FACTORS = "rope_freqs.weight"

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types, as numbered in the specification."""

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

EXPRESSIONS = {
    "gpt-2": (_GPT2,),
    "qwen2": (_CASELESS + r"\p{N}" + _REST,),
    "llama-bpe": (_CASELESS + r"\p{N}{1,3}" + _REST,),
    "smollm": (r"\p{N}", _GPT2),
}
"""Regular expressions that split text, one after another, before byte-level BPE, by llama.cpp's
names (src/llama-vocab.cpp)."""

WHOLE_WORDS = "llama-bpe"
"""The expression with which a word that is a token is never split."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer in GGUF's terms; the fields are the file's `tokenizer.ggml.*` keys."""

    model: str
    """`llama` (SentencePiece's BPE, by scores) or `gpt2` (BPE of bytes, by merges)."""

    pre: str
    """llama.cpp's name for the pre-tokenizer."""

    tokens: Sequence[str]
    token_type: Sequence[int]

    scores: Sequence[float]
    """Scores for `llama`: the pair with the highest score merges first; otherwise empty."""

    merges: Sequence[str]
    """Merges for `gpt2`: two tokens separated by a space, in order of priority; otherwise empty."""

    add_bos_token: bool
    add_eos_token: bool
    add_space_prefix: bool

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """A tokenizer built from these fields only."""
        numbers = {token: number for number, token in enumerate(self.tokens)}
        if self.model == "llama":
            merges = self._merges_by_score(numbers)
            tokenizer = Tokenizer(models.BPE(vocab=numbers, merges=merges, byte_fallback=True))
            prefix = [normalizers.Prepend(SPACE)] if self.add_space_prefix else []
            tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
        else:
            pairs = (merge.partition(" ") for merge in self.merges)
            merges = [(left, right) for left, _, right in pairs]
            words = self.pre == WHOLE_WORDS
            tokenizer = Tokenizer(models.BPE(vocab=numbers, merges=merges, ignore_merges=words))
            splits = (pre_tokenizers.Split(Regex(e), "isolated") for e in EXPRESSIONS[self.pre])
            by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, by_bytes])
        special = [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(self.tokens, self.token_type, strict=True)
            if kind in (CONTROL, USER_DEFINED, UNKNOWN) and token
        ]
        tokenizer.add_special_tokens(special)
        return tokenizer

    def _merges_by_score(self, numbers: Mapping[str, int]) -> list[tuple[str, str]]:
        """Pairs of tokens that merge into another token, highest score first."""
        merged = [t for t, score in zip(self.tokens, self.scores, strict=True) if score < 0]
        merged.sort(key=lambda token: -self.scores[numbers[token]])
        pairs = ((token[:end], token[end:]) for token in merged for end in range(1, len(token)))
        return [(left, right) for left, right in pairs if left in numbers and right in numbers]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens at its ends."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def agrees(self, texts: Mapping[str, Sequence[int]]) -> bool:
        """Whether the tokenizer encodes each text to its given tokens."""
        return all(self.encode(text) == ids for text, ids in texts.items())


def read_file(reader: "GGUFReader") -> tuple[Vocabulary, str | None, tuple[int, ...]]:
    """The vocabulary of a GGUF file, its chat template, and the ids that end a response."""

    def value(key: str) -> Any:  # noqa: ANN401  # any type
        field = reader.get_field(f"tokenizer.{key}")
        return None if field is None else field.contents()

    given: dict[str, Any] = {each.name: value(f"ggml.{each.name}") for each in fields(Vocabulary)}
    given |= {name: [] for name, each in given.items() if each is None}
    vocabulary = Vocabulary(**given)
    stops = (value(f"ggml.{kind}_token_id") for kind in STOPS)
    return vocabulary, value("chat_template"), tuple(each for each in stops if each is not None)
