"""Encoders of text, which add no special tokens and no prefix within a text."""

import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

Encoder = Callable[[str], list[int]]


def beginning_encoder(tokenizer: "PreTrainedTokenizerBase") -> Encoder:
    """Return an encoder for the start of a text, without added special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.split_special_tokens:
        return lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return partial(_encode, backend)  # a call of the tokenizer takes four times as long


def continuation_encoder(tokenizer: "PreTrainedTokenizerBase") -> Encoder:
    """Return an encoder for text that follows other text: like `tokenizer`, with no dummy prefix.

    The encoder may be a copy, which doesn't have tokens added to `tokenizer` later.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return beginning_encoder(tokenizer)
    state = json.loads(backend.to_str())
    stripped = {part: _remove_prefix(state[part]) for part in ("normalizer", "pre_tokenizer")}
    if all(stripped[part] == state[part] for part in stripped):
        return beginning_encoder(tokenizer)
    from tokenizers import Tokenizer

    return partial(_encode, Tokenizer.from_str(json.dumps({**state, **stripped})))


def _encode(backend: "Tokenizer", text: str) -> list[int]:
    if backend.truncation or backend.padding:  # enabled by an earlier call
        backend.no_truncation()
        backend.no_padding()
    return backend.encode(text, add_special_tokens=False).ids


def _remove_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer of tokenizer.json without its prefix for the start of text."""
    if part is None or part["type"] in ("Prepend", "Strip"):
        return None
    if part["type"] == "Sequence":
        name = "normalizers" if "normalizers" in part else "pretokenizers"
        kept = [stripped for inner in part[name] if (stripped := _remove_prefix(inner)) is not None]
        return {**part, name: kept} if kept else None
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    if part["type"] == "ByteLevel":
        return {**part, "add_prefix_space": False}
    return part
