"""A tokenizer as GGUF has it: tokens with kinds, scores or merges, and a few flags.

llama.cpp names the regular expressions that split text before byte-level BPE
(src/llama-vocab.cpp). A name is found here by the expression in tokenizer.json.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from pipeline.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of tokens, as the specification numbers them."""

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class Vocabulary:
    """What llama.cpp makes a tokenizer of."""

    model: str
    """`llama` (SentencePiece's BPE, by scores) or `gpt2` (BPE of bytes, by merges)."""

    pre: str
    """llama.cpp's name of the pre-tokenizer."""

    tokens: Sequence[str]
    kinds: Sequence[int]
    scores: Sequence[float]
    """Of `llama`: the higher, the earlier two neighbours become this token; else empty."""

    merges: Sequence[str]
    """Of `gpt2`: two tokens with a space between, the earliest first; else empty."""

    add_bos: bool
    add_eos: bool
    add_space_prefix: bool


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, rows: int, path: str) -> Vocabulary:
    """The vocabulary of a tokenizer; rows of the embedding that it has no token for are unused.

    Raises:
        ModelError: its kind has no GGUF form, or it has more tokens than the embedding rows.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(f"the tokenizer of {path} has no tokenizer.json; save it as one first")
    given: dict[str, Any] = json.loads(backend.to_str())
    model = given["model"]
    if model.get("type") != "BPE":
        raise ModelError(
            f"the tokenizer of {path} is of the kind {model.get('type')}, which has no GGUF form"
            " here; BPE has one"
        )
    tokens, kinds = _tokens(given, tokenizer, rows, path)
    begin, end = _surrounds(tokenizer)
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    by_scores = bool(model.get("byte_fallback"))
    return Vocabulary(
        model="llama" if by_scores else "gpt2",
        pre="default" if by_scores else pre_tokenizer_name(given, path),
        tokens=tokens,
        kinds=kinds,
        scores=_scores(tokens, merges) if by_scores else (),
        merges=() if by_scores else merges,
        add_bos=begin,
        add_eos=end,
        add_space_prefix=by_scores and _prefixes_space(given, path),
    )


def _tokens(
    given: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, rows: int, path: str
) -> tuple[list[str], list[int]]:
    numbered: dict[str, int] = tokenizer.get_vocab()
    if max(numbered.values(), default=0) >= rows:
        raise ModelError(
            f"the tokenizer of {path} has {max(numbered.values()) + 1} tokens and the model rows"
            f" for {rows}; they are not of one model"
        )
    tokens = [f"[PAD{number}]" for number in range(rows)]
    kinds = [UNUSED] * rows
    by_bytes = bool(given["model"].get("byte_fallback"))
    for token, number in numbered.items():
        tokens[number] = token
        is_byte = by_bytes and BYTE_TOKEN.fullmatch(token)
        kinds[number] = BYTE if is_byte else NORMAL
    for added in given["added_tokens"]:
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    if tokenizer.unk_token_id is not None and by_bytes:
        kinds[numbered[str(tokenizer.unk_token)]] = UNKNOWN
    return tokens, kinds


def _scores(tokens: Sequence[str], merges: Sequence[str]) -> list[float]:
    """-1, -2, ... in the order in which merges first make a token; 0 for those that none makes."""
    order: dict[str, int] = {}
    for merge in merges:
        left, _, right = merge.partition(" ")
        order.setdefault(left + right, len(order) + 1)
    return [-float(order.get(token, 0)) for token in tokens]


def _surrounds(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, bool]:
    """Whether encoding puts the token that begins a text in front, and the one that ends it."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a")
    begins = tokenizer.bos_token_id is not None and whole[:1] == [tokenizer.bos_token_id]
    ends = tokenizer.eos_token_id is not None and whole[-1:] == [tokenizer.eos_token_id]
    return begins and len(whole) > len(plain), ends and len(whole) > len(plain) + begins


def _prefixes_space(given: Mapping[str, Any], path: str) -> bool:
    """Whether a space goes in front of a text.

    Raises:
        ModelError: text is changed in another way than spaces.
    """
    normalizer = given.get("normalizer") or {"type": "Sequence", "normalizers": []}
    parts = normalizer.get("normalizers", [normalizer])
    prefix = False
    for part in parts:
        match part:
            case {"type": "Prepend", "prepend": str(text)} if text == SPACE:
                prefix = True
            case {"type": "Replace", "pattern": {"String": " "}, "content": str(text)} if (
                text == SPACE
            ):
                pass
            case _:
                raise ModelError(_no_form(path, f"the normalizer {part['type']}"))
    match given.get("pre_tokenizer"):
        case None:
            return prefix
        case {"type": "Metaspace", "replacement": str(text), "prepend_scheme": scheme} if (
            text == SPACE
        ):
            return prefix or scheme != "never"
        case {"type": kind}:
            raise ModelError(_no_form(path, f"the pre-tokenizer {kind}"))
    return prefix


def _no_form(path: str, what: str) -> str:
    return (
        f"the tokenizer of {path} has {what}, which has no GGUF form with SentencePiece's BPE;"
        " export it with --to onnx"
    )


def tokenizer_of(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer that a vocabulary describes, from nothing else; special tokens are found."""
    numbers = {token: number for number, token in enumerate(vocabulary.tokens)}
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if kind in (CONTROL, USER_DEFINED, UNKNOWN) and token
    ]
    if vocabulary.model == "llama":
        merges = _merges_by_score(vocabulary, numbers)
        tokenizer = Tokenizer(models.BPE(vocab=numbers, merges=merges, byte_fallback=True))
        prefix = [normalizers.Prepend(SPACE)] if vocabulary.add_space_prefix else []
        tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    else:
        merges = [(left, right) for left, _, right in (m.partition(" ") for m in vocabulary.merges)]
        ignores = vocabulary.pre in WHOLE_WORDS
        tokenizer = Tokenizer(models.BPE(vocab=numbers, merges=merges, ignore_merges=ignores))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(EXPRESSIONS[vocabulary.pre]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.add_special_tokens(special)
    return tokenizer


def _merges_by_score(vocabulary: Vocabulary, numbers: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs of tokens that make another one, those of the highest score first."""
    merged = [
        token
        for token, score in zip(vocabulary.tokens, vocabulary.scores, strict=True)
        if score < 0
    ]
    merged.sort(key=lambda token: -vocabulary.scores[numbers[token]])
    pairs = ((token[:end], token[end:]) for token in merged for end in range(1, len(token)))
    return [(left, right) for left, right in pairs if left in numbers and right in numbers]


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

EXPRESSIONS: Mapping[str, str] = {
    "gpt-2": GPT2,
    "qwen2": _CASELESS + r"\p{N}" + _REST,
    "llama-bpe": _CASELESS + r"\p{N}{1,3}" + _REST,
}
"""By llama.cpp's names."""

WHOLE_WORDS = {"llama-bpe"}
"""Those with which llama.cpp takes a word that is a token as it is, whatever the merges say."""


def pre_tokenizer_name(tokenizer: Mapping[str, Any], path: str) -> str:
    """llama.cpp's name of the pre-tokenizer in a tokenizer.json.

    Raises:
        ModelError: it has none.
    """
    found = _expression(tokenizer.get("pre_tokenizer"))
    for name, expression in EXPRESSIONS.items():
        ignores = bool(tokenizer["model"].get("ignore_merges"))
        if expression == found and ignores == (name in WHOLE_WORDS):
            return name
    raise ModelError(
        f"the tokenizer of {path} splits text in a way that llama.cpp has no name for here"
        f" ({_in_words(tokenizer)}); known are {', '.join(EXPRESSIONS)}; export it with --to onnx"
    )


def _expression(pre_tokenizer: Mapping[str, Any] | None) -> str | None:
    """The one expression that splits, where that and bytes are all it does."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}:
            return GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(found)}, "invert": False} as split,
                {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
            ],
        } if split.get("behavior") == "Isolated":
            return found
    return None


def _in_words(tokenizer: Mapping[str, Any]) -> str:
    """The pre-tokenizer's kinds, or its expression, short."""
    found = _expression(tokenizer.get("pre_tokenizer"))
    if found is None:
        found = str((tokenizer.get("pre_tokenizer") or {}).get("type", "none"))
    short = found if len(found) <= 60 else f"{found[:57]}..."
    return f"{short}, with ignore_merges" if tokenizer["model"].get("ignore_merges") else short
