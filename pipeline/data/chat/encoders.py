"""Text encoders that add no special tokens or prefix, and the tokens that begin or end a text."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.system.hub import cached_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

Encoder = Callable[[str], list[int]]

LONG_TEXT = 1000
"""Maximum length in characters of a text that is encoded without releasing the GIL; in a server, a
longer one would delay the streams of other clients."""


def beginning_encoder(tokenizer: "PreTrainedTokenizerBase") -> Encoder:
    """Return an encoder for the start of a text, without added special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.split_special_tokens:
        return lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return partial(_encode, backend)  # calling the tokenizer takes four times as long


def continuation_encoder(tokenizer: "PreTrainedTokenizerBase") -> Encoder:
    """Return an encoder for text that follows other text, without the tokenizer's dummy prefix.

    The encoder may be a copy, which lacks tokens that are added to `tokenizer` later.
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
    if len(text) > LONG_TEXT:
        return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return backend.encode(text, add_special_tokens=False).ids


def _remove_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """Remove the prefix for the start of text from a part of tokenizer.json."""
    if part is None or part["type"] in ("Prepend", "Strip"):
        return None
    if part["type"] == "Sequence":
        key = "normalizers" if "normalizers" in part else "pretokenizers"
        kept = [stripped for inner in part[key] if (stripped := _remove_prefix(inner)) is not None]
        return {**part, key: kept} if kept else None
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    return {**part, "add_prefix_space": False} if part["type"] == "ByteLevel" else part


def end_ids(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """Return the ids that end a text: the end-of-sequence id, then those that stop `generate`.

    `generate` stops at `eos_token_id` of the model's generation_config.json or config.json.
    """
    ids, source = [tokenizer.eos_token_id], str(tokenizer.name_or_path)
    for name in ("generation_config.json", "config.json") if source else ():
        local = Path(source) / name
        if file := local if local.is_file() else cached_file(source, name):
            declared = json.loads(Path(file).read_text("utf-8")).get("eos_token_id")
            ids += declared if isinstance(declared, list) else [declared]
            break
    known = set(tokenizer.get_vocab().values())
    return tuple(dict.fromkeys(id_ for id_ in ids if isinstance(id_, int) and id_ in known))


def adds_bos(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether the tokenizer adds a beginning-of-sequence token to a text."""
    ids = tokenizer("a", verbose=False)["input_ids"]
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]
