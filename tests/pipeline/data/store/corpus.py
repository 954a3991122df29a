"""Token files and tokenizers for these tests; nothing here needs PyTorch."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pipeline.data.store.layout import Layout, Origin
from pipeline.data.store.vocabulary import Vocabulary
from pipeline.data.store.writer import TokenWriter

EOS = 256

ORIGIN = Origin(
    tokenizer="bytes",
    tokenizer_hash="ab" * 32,
    vocabulary=300,
    eos=EOS,
    field="text",
    files=1,
    bytes=10,
    sources="cd" * 32,
    names=("a.jsonl",),
)


def byte_vocabulary() -> Vocabulary:
    """A tokenizer with a token for every byte and a special one, <|end|>, that is eos."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return Vocabulary("bytes", tokenizer.to_str(), "ab" * 32, EOS + 1, EOS)


def save_vocabulary(vocabulary: Vocabulary, path: Path) -> None:
    """For another process."""
    path.write_text(json.dumps(asdict(vocabulary)))


def write_tokens(path: Path, documents: list[list[int]], origin: Origin = ORIGIN) -> Layout:
    """A token file of these documents."""
    writer = TokenWriter(path, origin.width)
    for document in documents:
        writer.append(np.array(document), np.array([len(document)]))
    return writer.finish(origin)


def write_rows(path: Path, texts: list[str]) -> None:
    """Rows of JSON lines."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
