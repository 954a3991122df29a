"""The number that stands for a document."""

import hashlib

from pipeline.data.store.reader import TokenFile

HASHED = 4096
"""Tokens of a document that its hash is of: the first that many."""


def document_hash(file: TokenFile, document: int) -> int:
    """64 bits that stand for a document, whichever file it lies in.

    Raises:
        DataError: a block that it lies in is damaged.
    """
    start, end = file.span(document)
    ids = file.slice(start, min(end, start + HASHED)).astype("<u4")
    digest = hashlib.blake2b(ids.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
