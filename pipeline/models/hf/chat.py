"""A model's tokenizer and chat format."""

from collections.abc import Iterable, Sequence
from contextlib import suppress

from transformers import AutoConfig, PreTrainedTokenizerBase

from pipeline.config import EMBEDDED, DataConfig, FrozenModelConfig, TrainedModelConfig
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Example
from pipeline.models.forward.forward import max_positions
from pipeline.models.hf.directory import (
    check_configuration,
    check_model_directory,
    is_sequence_classifier,
)
from pipeline.models.hf.load import load_tokenizer, local_directory
from pipeline.system.errors import ConfigError, DataError, ModelError


def load_chat(config: FrozenModelConfig, data: DataConfig) -> ChatFormat:
    """Load the chat format `data.format`, and add its tokens and template to the tokenizer.

    The template is saved with the tokenizer, so that chats use the template of training, including
    its arguments (`data.template_args`) and date.

    Raises:
        ConfigError: the format adds tokens, and LoRA would not train their embeddings (new random
            rows, or unused rows of a padded table).
    """
    tokenizer = load_tokenizer(config)
    num_tokens = len(tokenizer)
    chat = resolve_format(tokenizer, data.format, data.template_args)
    chat.add_new_tokens()
    has_lora = isinstance(config, TrainedModelConfig) and config.lora is not None
    if has_lora and len(tokenizer) > num_tokens:
        raise ConfigError(
            f"the chat format has tokens that {config.path} lacks, and LoRA would leave their"
            " embeddings untrained; set lora to null or choose another data.format"
        )
    chat.attach(tokenizer)
    return chat


def decode_response(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, continues: bool = False
) -> str:
    """Decode a response without special tokens and strip it (`continues` keeps leading spaces)."""
    text = str(tokenizer.decode(list(ids), skip_special_tokens=True))
    return text.rstrip() if continues else text.strip()


def same_chat_format(
    tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, path: str
) -> bool:
    """Return whether a reward model can read the actor's tokens; otherwise it must read text.

    Raises:
        ModelError: the reward model has a different tokenizer and no chat template for text.
    """
    same_tokens = tokenizer.get_vocab() == other.get_vocab()
    if other.chat_template is None:
        if same_tokens:
            return True
        raise ModelError(
            f"the tokenizer of the reward model {path} differs from the actor's and has no chat"
            " template, so its dialogue format is unknown; add its template as chat_template.jinja"
        )
    return same_tokens and other.chat_template == tokenizer.chat_template


def require_same_chat(
    tokenizer: PreTrainedTokenizerBase,
    other: PreTrainedTokenizerBase,
    model: str,
    source: FrozenModelConfig,
) -> None:
    """Reject two models with different vocabularies or chat formats.

    `other`, the tokenizer of the model `source`, may lack a chat template.

    Raises:
        ModelError: the vocabularies or the chat templates differ.
    """
    path, vocab, other_vocab = str(source.path), tokenizer.get_vocab(), other.get_vocab()
    if vocab != other_vocab:
        tokens = vocab.keys() | other_vocab
        num_differing = sum(vocab.get(token) != other_vocab.get(token) for token in tokens)
        raise ModelError(
            f"{model} and {path} have different tokenizers (differing tokens: {num_differing});"
            " start both from models of the same family"
        )
    if other.chat_template is not None and other.chat_template != tokenizer.chat_template:
        raise ModelError(
            f"{model} would read dialogues in a chat format other than the one that {path} was"
            " trained with; set the same data.format (--format) for all steps"
        )


def check_ready(path: str, examples: Iterable[Example] = (), *, reward_model: bool = False) -> None:
    """Reject a model whose files, tokenizer or chat template can't be used.

    For a model on the Hub, only the tokenizer is read. `examples` contain prompts for the model.

    Raises:
        ModelError: there is no such model, or a part of it is missing or damaged.
        DataError: the template can't render a prompt, or a prompt leaves no room for a response.
    """
    local = None if path == EMBEDDED else local_directory(path)
    if local is not None:
        check_model_directory(local, generates=not reward_model)
        architectures = check_configuration(local).get("architectures") or ["unknown"]
        if reward_model and not is_sequence_classifier(architectures):
            problem = f"is not a reward model ({', '.join(architectures)}): it has no score head"
            raise ModelError(f"{path} {problem}; use step 2's output")
    chat = resolve_format(load_tokenizer(FrozenModelConfig(path=path)), "auto")
    limit: int | None = None
    if local is not None and not reward_model:
        with suppress(OSError, ValueError, KeyError):  # loading the model reports the error
            limit = max_positions(AutoConfig.from_pretrained(local))
    for example in examples:
        num_tokens = len(chat.encode_prompt(example.prompt, origin=example.origin))
        if limit is not None and num_tokens >= limit:
            raise DataError(
                f"{example.origin}: the prompt has {num_tokens} tokens, but the context of the"
                f" model {path} is {limit}, including the response; shorten the prompt"
            )
