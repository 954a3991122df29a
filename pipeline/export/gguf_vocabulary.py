"""The vocabulary of a GGUF file, and the tokenizer built from its fields alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from pipeline.system.errors import ModelError

if TYPE_CHECKING:
    from gguf import GGUFReader

STOPS = ("eos", "eot", "eom")
"""Kinds of tokens at which llama.cpp ends a response."""

ROPE_FACTORS = "rope_freqs.weight"

SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Names of special tokens in the keys of a file."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types, as numbered in the specification."""

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHER = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

PATTERNS = {
    "gpt-2": (_GPT2,),
    "qwen2": (_CASELESS + r"\p{N}" + _OTHER,),
    "llama-bpe": (_CASELESS + r"\p{N}{1,3}" + _OTHER,),
    "smollm": (r"\p{N}", _GPT2),
}
"""Regular expressions that split text, one after another, before byte-level BPE, by llama.cpp's
names (src/llama-vocab.cpp)."""

IGNORES_MERGES = "llama-bpe"
"""Name of the pre-tokenizer with which a word that is a token is never split."""


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
        ids = {token: number for number, token in enumerate(self.tokens)}
        if self.model == "llama":
            merges = self._merges_by_score(ids)
            tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, byte_fallback=True))
            prefix = [normalizers.Prepend(SPACE)] if self.add_space_prefix else []
            tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
        else:
            pairs = (merge.partition(" ") for merge in self.merges)
            merges = [(left, right) for left, _, right in pairs]
            bpe = models.BPE(vocab=ids, merges=merges, ignore_merges=self.pre == IGNORES_MERGES)
            tokenizer = Tokenizer(bpe)
            splits = (pre_tokenizers.Split(Regex(p), "isolated") for p in PATTERNS[self.pre])
            by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, by_bytes])
        special = [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(self.tokens, self.token_type, strict=True)
            if kind in (CONTROL, USER_DEFINED, UNKNOWN) and token
        ]
        tokenizer.add_special_tokens(special)
        return tokenizer

    def _merges_by_score(self, ids: Mapping[str, int]) -> list[tuple[str, str]]:
        """Return pairs of tokens that merge into another token, highest score first."""
        merged = [t for t, score in zip(self.tokens, self.scores, strict=True) if score < 0]
        merged.sort(key=lambda token: -self.scores[ids[token]])
        pairs = ((token[:end], token[end:]) for token in merged for end in range(1, len(token)))
        return [(left, right) for left, right in pairs if left in ids and right in ids]

    def encodes_as(self, texts: Mapping[str, Sequence[int]]) -> bool:
        """Return whether the tokenizer encodes each text to the given tokens."""
        encode = self.tokenizer.encode
        return all(encode(t, add_special_tokens=False).ids == ids for t, ids in texts.items())


def read_tokenizer(reader: "GGUFReader") -> tuple[PreTrainedTokenizerFast, tuple[int, ...]]:
    """Return a GGUF file's tokenizer with its chat template, and the ids that end a response.

    Raises:
        ModelError: the file's kind of tokenizer or pre-tokenizer is not supported.
    """

    def value(key: str) -> Any:  # noqa: ANN401  # any type
        field = reader.get_field(f"tokenizer.{key}")
        return None if field is None else field.contents()

    raw = {field.name: value(f"ggml.{field.name}") for field in fields(Vocabulary)}
    is_sentencepiece = raw["model"] == "llama"
    if not is_sentencepiece and (raw["model"] != "gpt2" or raw["pre"] not in PATTERNS):
        raise ModelError(
            f"the GGUF tokenizer ({raw['model']}, {raw['pre']}) is not supported, only"
            f" llama, and gpt2 with {', '.join(PATTERNS)}; use the model's directory"
        )
    defaults: dict[str, Any] = {"pre": "default", "token_type": [NORMAL] * len(raw["tokens"])}
    defaults |= {"scores": [], "merges": [], "add_eos_token": False}
    defaults |= {"add_bos_token": is_sentencepiece, "add_space_prefix": is_sentencepiece}
    given: dict[str, Any] = {name: content for name, content in raw.items() if content is not None}
    vocabulary = Vocabulary(**defaults | given)
    ids = {kind: value(f"ggml.{key}_token_id") for kind, key in SPECIAL.items()}
    tokens = {f"{k}_token": vocabulary.tokens[n] for k, n in ids.items() if n is not None}
    tokenizer = vocabulary.tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if is_sentencepiece:
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        strip = [decoders.Strip(" ", 1, 0)] if vocabulary.add_space_prefix else []
        tokenizer.decoder = decoders.Sequence([*steps, *strip])
    prefix = f"{tokens['bos_token']} " if vocabulary.add_bos_token else ""
    suffix = f" {tokens['eos_token']}" if vocabulary.add_eos_token else ""
    if prefix or suffix:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{prefix}$A{suffix}",
            special_tokens=[(token, ids[kind[:3]]) for kind, token in tokens.items()],
        )
    fast_tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)
    fast_tokenizer.chat_template = value("chat_template")
    stops = (value(f"ggml.{kind}_token_id") for kind in STOPS)
    return fast_tokenizer, tuple(number for number in stops if number is not None)
