"""What is not a token file yet becomes one, in the step's own directory, before the step begins."""

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from pipeline.data.corpus.paths import CorpusPath
from pipeline.data.store.config import PackConfig
from pipeline.data.store.convert import to_tokens
from pipeline.data.store.pack import pack
from pipeline.data.store.sources import SourceFile, find_sources
from pipeline.data.store.vocabulary import Vocabulary
from pipeline.errors import DataError
from pipeline.files.lock import RunLock

logger = logging.getLogger(__name__)

DIRECTORY = "tokens"
"""Below the step's directory."""

WORKER_BYTES = 16 * 2**20
"""Of text for which a further worker is worth its start."""

MOST_BYTES = 2**30
"""Of text that a step packs by itself, while its other processes wait."""


def prepare(
    paths: Sequence[CorpusPath], vocabulary: Vocabulary, directory: Path, *, field: str
) -> None:
    """Pack and convert what is not yet a token file in `directory`.

    Raises:
        DataError: there is too much text, or it can't be used.
    """
    check_size(paths, vocabulary.name)
    for path in paths:
        for target, files in targets(path, vocabulary, directory, field=field).items():
            if path.kind == "tokens" or target.exists():
                continue
            directory.mkdir(parents=True, exist_ok=True)
            with RunLock(target.with_name(target.name + ".lock")):
                if path.kind == "text":
                    _pack(files, target, vocabulary, field=field)
                else:
                    logger.info("converts %s to %s", files[0], target)
                    to_tokens(files[0], vocabulary, target)


def targets(
    path: CorpusPath, vocabulary: Vocabulary, directory: Path, *, field: str
) -> dict[Path, list[Path]]:
    """The token files of a data path, each with the files that it is made of.

    Their names follow from the names, sizes and times of these, the tokenizer and the field: what
    has changed is packed again.
    """
    if path.kind == "tokens":
        return {file: [file] for file in path.files}
    groups = [list(path.files)] if path.kind == "text" else [[file] for file in path.files]
    return {directory / _name(files, vocabulary, field): files for files in groups}


def check_size(paths: Sequence[CorpusPath], tokenizer: str) -> None:
    """Refuse more text than a step packs by itself.

    Raises:
        DataError: it says the command that packs it.
    """
    texts = [path for path in paths if path.kind == "text"]
    size = sum(file.stat().st_size for path in texts for file in path.files)
    if size > MOST_BYTES:
        names = " ".join(f"'{path.name}'" for path in texts)
        raise DataError(
            f"{names}: {size / 2**30:.1f} GiB of text are packed faster by several workers, once"
            f" for all runs: `python -m pipeline.data.store pack {names} --tokenizer {tokenizer}"
            " --out X.tokens --workers N`; then give X.tokens"
        )


def _pack(files: Sequence[Path], target: Path, vocabulary: Vocabulary, *, field: str) -> None:
    sources: list[SourceFile] = find_sources([str(file) for file in files])
    size = sum(source.bytes for source in sources)
    workers = max(1, min(os.cpu_count() or 1, size // WORKER_BYTES))
    config = PackConfig(
        out=target, tokenizer=vocabulary.name, workers=workers, field=field, resume=True
    )
    packed = pack(sources, vocabulary, config)
    layout = packed.layout
    logger.info(
        "packed %s into %s: %s documents, %s tokens, in %.1f s",
        files[0] if len(files) == 1 else f"{len(files)} files",
        target,
        f"{layout.documents:,}",
        f"{layout.tokens:,}",
        packed.seconds,
    )


def _name(files: Sequence[Path], vocabulary: Vocabulary, field: str) -> str:
    stats = [(str(file.absolute()), file.stat()) for file in files]
    made_of = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    digest = hashlib.sha256(f"{made_of} {vocabulary.hash} {field}".encode()).hexdigest()[:12]
    return f"{files[0].name.partition('.')[0]}-{digest}.tokens"
