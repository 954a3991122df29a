"""Token files and tokenizers for these tests; nothing here needs PyTorch."""

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pipeline.data.store.token_file import Origin, TokenFile, TokenWriter, Vocabulary, token_dtype

EOS = 256
ORIGIN = Origin("bytes", "ab" * 32)


def byte_vocabulary() -> Vocabulary:
    """Return a tokenizer with a token for every byte and a special one, <|end|>, as eos."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {byte: number for number, byte in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.enable_truncation(4)  # as in some tokenizer.json files; documents must stay whole
    return Vocabulary("bytes", tokenizer.to_str(), ORIGIN.tokenizer_hash, EOS + 1, EOS)


def write_tokens(
    path: Path, documents: list[list[int]], origin: Origin | None = ORIGIN
) -> TokenFile:
    """Write a token file of these documents."""
    with TokenWriter(path, token_dtype(300)) as writer:
        for document in documents:
            writer.append(np.array(document), np.array([len(document)]))
        return writer.finish(origin)


def write_rows(path: Path, texts: list[str]) -> None:
    """Write rows of JSON lines."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
