"""A tokenizer as `pipeline.data.store` needs it.

PyTorch and transformers are imported where they are used: a pack has its vocabulary made by another
process, and does without their memory itself. transformers' generic class for a `tokenizer.json`
comes without PyTorch, whose import takes four times as long as all else that a pack begins with.
"""

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from pipeline.config import EMBEDDED, FrozenModelConfig
from pipeline.data.store.vocabulary import Vocabulary, vocabulary_of
from pipeline.models.directory import check_configuration, check_tokenizer

GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Names of the class that takes a `tokenizer.json` as it is."""

_NAMES = """
    bloom falcon gemma gemma2 gemma3_text gpt2 gpt_neo gpt_neox gptj llama mistral olmo olmo2 opt
    phi qwen3 stablelm
"""
TRUSTED = tuple(_NAMES.split())
"""Families, by `model_type`, of which transformers believes that a tokenizer is of that class."""


def load_vocabulary(path: str) -> Vocabulary:
    """What makes tokens of the tokenizer at `path`.

    Raises:
        UserError: there is none, or none that can be used.
    """
    found = generic_vocabulary(path)
    if found is not None:
        return found
    from pipeline.models.load import load_tokenizer

    return vocabulary_of(load_tokenizer(FrozenModelConfig(path=path)), path)


def load_vocabulary_apart(path: str) -> Vocabulary:
    """The vocabulary, loaded by a process that ends with it.

    Raises:
        UserError: there is none, or none that can be used.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        return apart.submit(load_vocabulary, path).result()


def generic_vocabulary(path: str) -> Vocabulary | None:
    """That of a directory whose tokenizer is transformers' generic one, without PyTorch.

    Returns:
        None of any other, and where something is missing or wrong, which loading in full names.

    Raises:
        ModelError: a file of the directory is missing or broken.
    """
    directory = Path(path).expanduser()
    if path == EMBEDDED or not directory.is_dir():
        return None
    model = check_configuration(directory)
    check_tokenizer(directory)
    settings_file = directory / "tokenizer_config.json"
    if not (settings_file.is_file() and (directory / "tokenizer.json").is_file()):
        return None
    settings = json.loads(settings_file.read_bytes())
    is_generic = settings.get("tokenizer_class") in GENERIC and model["model_type"] in TRUSTED
    if not is_generic or "auto_map" in settings or "auto_map" in model:
        return None
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    except Exception:  # noqa: BLE001  # of any kind: loading in full has a sentence for each
        return None
    return None if tokenizer.eos_token_id is None else vocabulary_of(tokenizer, path)
