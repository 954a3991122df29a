"""A model that is served: its weights, its tokenizer, its batch."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.serve.adapter_files import tokenizer_directory
from inference.serve.adapters import with_adapter
from inference.serve.config import ServeConfig
from inference.serve.errors import ApiError
from inference.serve.lanes import Lane, Seat
from inference.serve.models import ModelPath
from inference.serve.token_bytes import TokenBytes
from inference.weights.hash import weights_hash
from pipeline.config import FrozenModelConfig
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.chat.resolve_format import Argument, never_read, resolve_format
from pipeline.data.examples import Message
from pipeline.errors import ModelError, UserError
from pipeline.models.load import lacks_tokens, load_causal_lm, load_tokenizer
from pipeline.parallel.device import local_device

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """All that belongs to one name."""

    name: str
    path: str
    base: str | None
    """Of an adapter, the name of the model that it changes."""
    model: PreTrainedModel
    """What it says of given tokens; it generates in its lane."""
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    seat: Seat
    weights_hash: str
    bytes_of: TokenBytes

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        continues: bool,
        opens: bool = True,
        arguments: Mapping[str, Argument] | None = None,
    ) -> list[int]:
        """Token ids of a dialogue that the model goes on from.

        Args:
            messages: the dialogue.
            continues: whether its last turn, the assistant's, is unfinished.
            opens: whether, else, the generation prompt follows a user's turn.
            arguments: of the chat template.

        Raises:
            ApiError: the template can't render it or doesn't read an argument, or it ends in the
                wrong turn.
        """
        answered = messages[-1].role == "assistant"
        if (continues and not answered) or (answered and opens and not continues):
            raise ApiError(
                400,
                "messages must end in a user's turn, or in the assistant's with"
                " continue_final_message true",
                param="messages",
            )
        chat = self.chat_with(arguments) if arguments else self.chat
        try:
            if not answered:
                return chat.encode_prompt(messages, generation_prompt=opens)
            ids = chat.encode(messages[:-1], messages[-1:]).input_ids
        except UserError as error:
            raise ApiError(400, str(error), param="messages") from None
        return ids[:-1] if continues and ids[-1] in self.chat.stop_ids else ids

    def chat_with(self, arguments: Mapping[str, Argument]) -> ChatFormat:
        """The chat format with arguments of its template."""
        unknown = never_read(self.chat.template, arguments)
        if unknown:
            names = ", ".join(name[:64] for name in unknown[:16])
            raise ApiError(
                400,
                f"chat_template_kwargs: the chat template of {self.name} never reads {names}; leave"
                " out what it doesn't read",
                param="chat_template_kwargs",
            )
        try:
            return resolve_format(self.tokenizer, "auto", arguments)
        except UserError as error:
            reason = str(error).replace("data.template_args", "chat_template_kwargs:")
            raise ApiError(400, reason, param="chat_template_kwargs") from None

    def encode_text(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text as it is, after what the tokenizer begins a text with."""
        begins = self.tokenizer.bos_token
        special = special and not (begins and text.startswith(str(begins)))
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    @property
    def lane(self) -> Lane:
        """The batch that it generates in."""
        return self.seat.lane

    @property
    def context(self) -> int:
        """Most tokens of prompt and response."""
        return self.lane.context

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows."""
        return vocabulary_of(self.model)


def vocabulary_of(model: PreTrainedModel) -> int:
    """Tokens that a model knows."""
    return model.get_input_embeddings().weight.shape[0]  # pyright: ignore[reportReturnType, reportOptionalMemberAccess, reportAttributeAccessIssue, reportIndexIssue]


def load_model(
    place: ModelPath, config: ServeConfig, base: PreTrainedModel | None
) -> tuple[PreTrainedModel, int]:
    """A model and the hash of its weights; an adapter over `base`.

    Raises:
        ModelError: there is none, or a part of it is missing or damaged.
    """
    device = local_device()
    if place.adapter is not None and base is not None:
        model = with_adapter(base, place.adapter)
        return model, weights_hash(model)
    settings = FrozenModelConfig(path=place.path, precision=config.precision)
    model = load_causal_lm(settings, device=device, seed=place.seed)
    return model.requires_grad_(requires_grad=False), weights_hash(model)


def serve_model(
    place: ModelPath, model: PreTrainedModel, seat: Seat, *, weights: int
) -> ServedModel:
    """All that belongs to a model that is loaded, whose weights have this hash.

    Raises:
        ModelError: its tokenizer is missing or damaged, or has tokens that the model lacks.
    """
    tokenizer = _tokenizer(place, FrozenModelConfig(path=place.path))
    if place.adapter is not None:
        _require_rows(place, tokenizer, model)
    return ServedModel(
        name=place.name,
        path=place.path,
        base=place.base,
        model=model,
        tokenizer=tokenizer,
        chat=resolve_format(tokenizer, "auto"),
        seat=seat,
        weights_hash=f"{weights:013x}",
        bytes_of=TokenBytes(tokenizer),
    )


def _require_rows(
    place: ModelPath, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> None:
    if lacks_tokens(model, tokenizer):
        raise ModelError(
            f"the adapter {place.name} has a tokenizer of {len(tokenizer)} tokens beside it, and"
            f" {place.base} has {vocabulary_of(model)}; give the model that it was trained on as"
            " --path"
        )


def _tokenizer(place: ModelPath, config: FrozenModelConfig) -> PreTrainedTokenizerBase:
    """The model's own; of a base model the one that a step gave a chat template, if it is the same.

    So base and trained models are given the same text. An adapter has the one that it was trained
    with, if that lies beside it.
    """
    if place.adapter is not None and (directory := tokenizer_directory(place.adapter)):
        return load_tokenizer(FrozenModelConfig(path=directory))
    own = load_tokenizer(config)
    if place.format_of is None or own.chat_template:
        return own
    trained = load_tokenizer(FrozenModelConfig(path=place.format_of))
    return trained if trained.get_vocab() == own.get_vocab() else own
