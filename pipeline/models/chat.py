"""A model's tokenizer and chat format, together."""

import logging
from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from pipeline.config import FrozenModelConfig
from pipeline.data.chat_format import ChatFormat, resolve_format
from pipeline.data.template import Argument
from pipeline.errors import ModelError
from pipeline.models.load import load_tokenizer

logger = logging.getLogger(__name__)


def load_chat(
    config: FrozenModelConfig,
    name: str,
    arguments: Mapping[str, Argument] | None = None,
    date: str | None = None,
) -> tuple[PreTrainedTokenizerBase, ChatFormat]:
    """The tokenizer with the format's special tokens and template, and the format called `name`.

    Saving the tokenizer saves the template, so that chat uses the one the model was trained with,
    its arguments and date (`data.template_args`, `data.template_date`) included.
    """
    tokenizer = load_tokenizer(config)
    chat = resolve_format(tokenizer, name, arguments, date)
    if not chat.keeps_history:
        logger.info(
            "the chat template renders an answer otherwise once more turns follow (it leaves"
            " thinking out, say): of a dialogue of several turns only the last answer is trained"
        )
    chat.add_new_tokens()
    chat.attach(tokenizer)
    return tokenizer, chat


def decode_response(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of a response, without special tokens and the space in front."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True)).strip()


def require_same_chat(
    tokenizer: PreTrainedTokenizerBase,
    other: PreTrainedTokenizerBase,
    model: str,
    source: FrozenModelConfig,
) -> None:
    """Refuse two models that number their tokens differently or were trained in two chat formats.

    A model without a saved template has no format of its own yet.

    Raises:
        ModelError: the vocabularies or the chat templates differ.
    """
    path = str(source.path)
    require_same_tokens(tokenizer, other, model, path)
    if other.chat_template is not None and other.chat_template != tokenizer.chat_template:
        raise ModelError(
            f"{model} is given dialogues in another chat format than {path} was trained in; set the"
            " same data.format (--format) for all steps"
        )


def require_same_tokens(
    tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, model: str, path: str
) -> None:
    """Refuse two models that number their tokens differently: they read each other's token ids.

    Raises:
        ModelError: the vocabularies differ.
    """
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    if ours != theirs:
        differing = sum(ours.get(token) != theirs.get(token) for token in ours.keys() | theirs)
        raise ModelError(
            f"{model} and {path} have different tokenizers ({differing} tokens differ); start both"
            " from models of one family"
        )
