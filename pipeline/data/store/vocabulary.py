"""Tokenizer of a token file: definition, hash and end-of-sequence token."""

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.system.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, as worker processes need it."""

    name: str
    definition: str
    """JSON that `tokenizers` reads."""

    hash: str
    """SHA-256 of the definition and eos, hexadecimal."""

    size: int
    """Every id is below this number."""

    eos: int


def vocabulary_of(tokenizer: "PreTrainedTokenizerBase", name: str) -> Vocabulary:
    """Return the definition of a tokenizer.

    Raises:
        DataError: it has no fast form, or no end-of-sequence token.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        raise DataError(f"the tokenizer {name} has no fast form (tokenizer.json), which pack needs")
    eos = tokenizer.eos_token_id
    if not isinstance(eos, int):
        raise DataError(f"the tokenizer {name} has no end-of-sequence token; choose another one")
    parts = {**json.loads(backend.to_str()), "truncation": None, "padding": None}
    definition = json.dumps(parts, sort_keys=True)
    digest = hashlib.sha256(f"{definition}\n{eos}".encode()).hexdigest()
    return Vocabulary(name, definition, digest, max(tokenizer.get_vocab().values()) + 1, eos)
