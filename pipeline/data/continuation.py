"""Tokenizing text that continues other text.

Sentencepiece-style tokenizers put a space before the text they are given ("dummy prefix"). In the
middle of a dialogue that space belongs to nobody: it would be decoded into the text.
"""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Encoder = Callable[[str], list[int]]


def beginning_encoder(tokenizer: "PreTrainedTokenizerBase") -> Encoder:
    """Token ids of a text as `tokenizer` gives them, without special tokens of its own."""

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    return encode


def continuation_encoder(tokenizer: "PreTrainedTokenizerBase") -> Encoder:
    """Token ids of a text that follows another text: like `tokenizer`, with no dummy prefix.

    The encoder is a copy: tokens added to `tokenizer` later are unknown to it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return beginning_encoder(tokenizer)
    state = json.loads(backend.to_str())
    bare = {
        **state,
        "truncation": None,
        "padding": None,
        "normalizer": _without_prefix(state["normalizer"]),
        "pre_tokenizer": _without_prefix(state["pre_tokenizer"]),
    }
    if (bare["normalizer"], bare["pre_tokenizer"]) == (
        state["normalizer"],
        state["pre_tokenizer"],
    ):
        return beginning_encoder(tokenizer)
    from tokenizers import Tokenizer

    copy = Tokenizer.from_str(json.dumps(bare))
    return lambda text: copy.encode(text, add_special_tokens=False).ids


def _without_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer of tokenizer.json, less what it does to the start of a text."""
    if part is None or part["type"] in ("Prepend", "Strip"):
        return None
    if part["type"] == "Sequence":
        name = "normalizers" if "normalizers" in part else "pretokenizers"
        kept = [bare for inner in part[name] if (bare := _without_prefix(inner)) is not None]
        return {**part, name: kept} if kept else None
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    if part["type"] == "ByteLevel":
        return {**part, "add_prefix_space": False}
    return part
