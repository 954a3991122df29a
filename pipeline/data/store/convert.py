"""Token files of other programs' documents."""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.store.layout import Layout, Origin
from pipeline.data.store.megatron import read_megatron
from pipeline.data.store.modalities import read_modalities
from pipeline.data.store.vocabulary import Vocabulary
from pipeline.data.store.writer import TokenWriter
from pipeline.errors import DataError

PART = 2**20
"""Tokens that wait to be written."""

READERS = {".idx": read_megatron, ".bin": read_megatron, ".pbin": read_modalities}


def read_documents(path: Path) -> Iterator[NDArray[Any]]:
    """The documents of a file of another program, by the end of its name.

    Raises:
        DataError: the file can't be used.
    """
    if path.suffix not in READERS:
        raise DataError(
            f"{path} is of no known format: .bin and .idx are read as Megatron's, .pbin as"
            " Modalities'"
        )
    return READERS[path.suffix](path)


def to_tokens(path: Path, vocabulary: Vocabulary, out: Path) -> Layout:
    """Write the documents of another program's file as a token file.

    Each one that does not end with eos gets it.

    Raises:
        DataError: the file can't be used, or has an id that the tokenizer does not have.
    """
    origin = Origin(
        tokenizer=vocabulary.name,
        tokenizer_hash=vocabulary.hash,
        vocabulary=vocabulary.size,
        eos=vocabulary.eos,
        field="",
        files=1,
        bytes=path.stat().st_size if path.exists() else 0,
        sources="",
        names=(path.name,),
    )
    documents = read_documents(path)
    first = next(documents, None)
    if first is None:
        raise DataError(f"{path} has no documents")
    ended = _ended(path, chain([first], documents), vocabulary)
    with TokenWriter(out, origin.width) as writer:
        try:
            for ids, lengths in _joined(ended, origin.width):
                writer.append(ids, lengths)
            return writer.finish(origin)
        except BaseException:
            writer.discard()
            raise


def _ended(
    path: Path, documents: Iterable[NDArray[Any]], vocabulary: Vocabulary
) -> Iterator[NDArray[Any]]:
    for number, ids in enumerate(documents):
        if len(ids) and (int(ids.max()) >= vocabulary.size or int(ids.min()) < 0):
            raise DataError(
                f"{path}: document {number:,} has ids that {vocabulary.name} does not have; name"
                " the tokenizer that made it with --tokenizer"
            )
        has_eos = len(ids) and int(ids[-1]) == vocabulary.eos
        yield ids if has_eos else np.append(ids.astype(np.int64), vocabulary.eos)


def _joined(
    documents: Iterable[NDArray[Any]], width: int
) -> Iterator[tuple[NDArray[Any], NDArray[np.uint32]]]:
    """Documents put together, as the writer takes them."""
    waiting: list[NDArray[Any]] = []
    count = 0
    for document in documents:
        waiting.append(document.astype(f"<u{width}"))
        count += len(document)
        if count >= PART:
            yield np.concatenate(waiting), np.array([len(each) for each in waiting], np.uint32)
            waiting, count = [], 0
    if waiting:
        yield np.concatenate(waiting), np.array([len(each) for each in waiting], np.uint32)
