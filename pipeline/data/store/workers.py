"""Pieces to tokens by several processes, in order, with few of them in flight."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from pipeline.data.store.encode import Encoded, Encoder, Recipe
from pipeline.data.store.pieces import Piece
from pipeline.errors import DataError

AHEAD = 2
"""Pieces in flight for each worker: one that it works on and one that waits."""


def encode_all(
    recipe: Recipe, pieces: Iterable[Piece], workers: int
) -> Generator[tuple[Piece, Encoded]]:
    """Each piece with its documents, in the order of the pieces.

    Args:
        recipe: how they become tokens.
        pieces: of the corpus.
        workers: processes; 1 is this one.

    Raises:
        DataError: a file can't be read, or a worker was killed.
    """
    if workers == 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        encode = recipe.make()
        for piece in pieces:
            yield piece, encode(piece)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _begin, (recipe,))
    flying: deque[tuple[Piece, Future[Encoded]]] = deque()
    try:
        for piece in pieces:
            flying.append((piece, pool.submit(_encode, piece)))
            if len(flying) >= AHEAD * workers:
                yield _first(flying)
        while flying:
            yield _first(flying)
    except BrokenProcessPool as error:
        raise DataError(
            "a worker was killed, likely for want of memory; go on with --resume and fewer"
            " --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _first(flying: deque[tuple[Piece, Future[Encoded]]]) -> tuple[Piece, Encoded]:
    piece, future = flying.popleft()
    return piece, future.result()


class _Worker:
    """What a worker process keeps from one piece to the next."""

    encode: Encoder


def _begin(recipe: Recipe) -> None:
    """Make the process ready; it ends with its parent, however that ends, and leaves it Ctrl-C."""
    # One thread of the tokenizer's own, whose memory is apart from Python's: a tenth faster.
    os.environ["TOKENIZERS_PARALLELISM"], os.environ["RAYON_NUM_THREADS"] = "true", "1"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _Worker.encode = staticmethod(recipe.make())


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(piece: Piece) -> Encoded:
    return _Worker.encode(piece)
