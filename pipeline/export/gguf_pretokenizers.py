"""llama.cpp's names of the regular expressions that split text before byte-level BPE.

A name stands for an expression in llama.cpp's source (src/llama-vocab.cpp). It is found here by the
expression in tokenizer.json: a hash of a tokenizer's output, as llama.cpp's converter has it, is
another one after a fine-tuned model's added tokens.
"""

from collections.abc import Mapping
from typing import Any

from pipeline.errors import ModelError

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


def name_of(tokenizer: Mapping[str, Any], path: str) -> str:
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
