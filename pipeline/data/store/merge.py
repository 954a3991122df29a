"""Several token files in one, streamed."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.data.store.documents import parts_of
from pipeline.data.store.layout import Layout, Origin, Rendering
from pipeline.data.store.reader import TokenFile
from pipeline.data.store.writer import TokenWriter
from pipeline.errors import DataError


def merge(files: Sequence[TokenFile], out: Path) -> Layout:
    """Write the documents of the files, one file after the other, each block checked.

    Raises:
        DataError: the files are of different tokenizers or kinds, or a block is damaged.
    """
    origin = merged_origin(files)
    with TokenWriter(out, origin.width, marked=origin.rendering is not None) as writer:
        try:
            for file in files:
                for _, documents in parts_of(file):
                    writer.append(documents.ids, documents.lengths, documents.marks)
            return writer.finish(origin)
        except BaseException:
            writer.discard()
            raise


def merged_origin(files: Sequence[TokenFile]) -> Origin:
    """What the header of the merged file says.

    Raises:
        DataError: the files are of different tokenizers or kinds.
    """
    first = files[0]
    for file in files[1:]:
        if file.origin.tokenizer_hash != first.origin.tokenizer_hash:
            raise DataError(
                f"{file.path} was packed with another tokenizer ({file.origin.tokenizer}) than"
                f" {first.path} ({first.origin.tokenizer}); pack them with the same one"
            )
        _check_kind(file, first)
    origins = [file.origin for file in files]
    fields = sorted({origin.field for origin in origins})
    return replace(
        first.origin,
        field=" ".join(fields),
        files=sum(origin.files for origin in origins),
        bytes=sum(origin.bytes for origin in origins),
        sources=hashlib.sha256("".join(each.sources for each in origins).encode()).hexdigest(),
        names=tuple(name for origin in origins for name in origin.names),
        bad_rows=sum(origin.bad_rows for origin in origins),
        rendering=_merged_rendering([origin.rendering for origin in origins]),
    )


def _check_kind(file: TokenFile, first: TokenFile) -> None:
    ours, theirs = file.origin.rendering, first.origin.rendering
    if (ours is None) != (theirs is None):
        dialogues, texts = (file, first) if theirs is None else (first, file)
        raise DataError(f"{dialogues.path} holds dialogues, and {texts.path} texts; merge one kind")
    if ours is not None and theirs is not None and ours.settings != theirs.settings:
        raise DataError(
            f"{file.path} has its dialogues in another form than {first.path} ({ours.described},"
            f" and {theirs.described}); pack them with the same settings"
        )


def _merged_rendering(renderings: Sequence[Rendering | None]) -> Rendering | None:
    known = [each for each in renderings if each is not None]
    return replace(known[0], left_out=sum(each.left_out for each in known)) if known else None
