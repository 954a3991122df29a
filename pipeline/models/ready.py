"""Is a model ready to be asked? Looked at before the weights of any model are read."""

from collections.abc import Iterable, Sequence

from transformers import AutoConfig

from pipeline.config import EMBEDDED, FrozenModelConfig
from pipeline.data.examples import Example
from pipeline.data.resolve_format import resolve_format
from pipeline.errors import DataError, ModelError
from pipeline.models.directory import check_configuration, check_model_directory
from pipeline.models.load import load_tokenizer, local_directory


def check_ready(path: str, examples: Iterable[Example] = (), *, scores: bool = False) -> None:
    """Refuse a model whose files, tokenizer or chat template can be seen not to do.

    Args:
        path: of a directory, or a name on the Hub, of which the tokenizer alone is asked for.
        examples: rows whose prompts it will be given.
        scores: whether it must be a reward model.

    Raises:
        ModelError: there is no such model, or a part of it is missing or damaged.
        DataError: its template can't render one of the dialogues, or leaves it no room to answer.
    """
    local = None if path == EMBEDDED else local_directory(path)
    if local is not None:
        check_model_directory(local)
        if scores:
            require_score_head(path, check_configuration(local).get("architectures"))
    chat = resolve_format(load_tokenizer(FrozenModelConfig(path=path)), "auto")
    limit = None if local is None or scores else _context(str(local))
    for example in examples:
        count = len(chat.encode_prompt(example.prompt))
        if limit is not None and count >= limit:
            raise DataError(
                f"{example.origin}: the prompt has {count} tokens; the model {path} reads 1 to"
                f" {limit}, and answers in the same {limit}"
            )


def require_score_head(path: str, kinds: Sequence[str] | None) -> None:
    """Refuse a model that gives no score.

    Raises:
        ModelError: none of its architectures is one of a reward model.
    """
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds or ()):
        raise ModelError(
            f"{path} is not a reward model ({', '.join(kinds or ()) or 'unknown'}): it has no score"
            " head; give step 2's output"
        )


def _context(path: str) -> int | None:
    try:
        settings = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError):  # whoever loads it says what is wrong
        return None
    return getattr(settings.get_text_config(), "max_position_embeddings", None)
