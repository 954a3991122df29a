"""A tokenizer as `pipeline.data.store` needs it.

PyTorch and transformers are imported where they are used: a pack has its vocabulary made by another
process, and does without their memory itself.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from pipeline.config import FrozenModelConfig
from pipeline.data.store.vocabulary import Vocabulary, vocabulary_of


def load_vocabulary(path: str) -> Vocabulary:
    """What makes tokens of the tokenizer at `path`.

    Raises:
        UserError: there is none, or none that can be used.
    """
    from pipeline.models.load import load_tokenizer

    return vocabulary_of(load_tokenizer(FrozenModelConfig(path=path)), path)


def load_vocabulary_apart(path: str) -> Vocabulary:
    """The same, loaded by a process that ends with it.

    Raises:
        UserError: there is none, or none that can be used.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        return apart.submit(load_vocabulary, path).result()
