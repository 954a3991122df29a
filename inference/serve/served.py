"""Models that are served: weights, tokenizer, batch; and the reward model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.engine.batch import OpenBatch
from inference.engine.sampling import Reported, reported
from inference.serve.http import ApiError
from inference.serve.text import TokenBytes
from pipeline.data.batches import TokenBatch, collate
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.chat.resolve_format import Argument, never_read, resolve_format
from pipeline.data.examples import Encoded, Message
from pipeline.errors import UserError
from pipeline.models.forward import Policy, Scorer, base_model, context_length
from pipeline.models.reward_model import load_scorer
from pipeline.parallel.device import local_device

MOST_LOGITS = 2**26
"""Logits of one pass over a prompt: 256 MiB of fp32, and as much again for log-probabilities."""


@dataclass(frozen=True)
class Lane:
    """A batch, which a model and its adapters share."""

    name: str
    """Name of the model."""

    batch: OpenBatch
    num_slots: int

    context: int
    """Most tokens of prompt and response."""

    names: tuple[str, ...]
    """Names of the model and of its adapters, by their numbers in the batch."""


@dataclass(frozen=True)
class ServedModel:
    """A model or adapter with a name."""

    name: str

    base: str | None
    """Of an adapter, the name of its model."""

    model: PreTrainedModel
    """Scores given tokens; generates in its lane."""

    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    lane: Lane
    weights_hash: str
    bytes_of: TokenBytes

    @property
    def adapter(self) -> int:
        """Its number in its lane, 0 for the model itself."""
        return self.lane.names.index(self.name)

    @property
    def context(self) -> int:
        """Most tokens of prompt and response."""
        return self.lane.context

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model knows."""
        return vocabulary_of(self.model)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        continues: bool,
        opens: bool = True,
        arguments: Mapping[str, Argument] | None = None,
    ) -> list[int]:
        """Token ids of a dialogue as a prompt.

        Args:
            messages: the dialogue.
            continues: whether its last turn, the assistant's, is unfinished.
            opens: whether, otherwise, the generation prompt follows a user's turn.
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
        chat = self._chat_with(arguments) if arguments else self.chat
        try:
            if not answered:
                return chat.encode_prompt(messages, generation_prompt=opens)
            ids = chat.encode(messages[:-1], messages[-1:]).input_ids
        except UserError as error:
            raise ApiError(400, str(error), param="messages") from None
        return ids[:-1] if continues and ids[-1] in self.chat.stop_ids else ids

    def _chat_with(self, arguments: Mapping[str, Argument]) -> ChatFormat:
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
        """Token ids of a text, after the tokenizer's first special tokens."""
        begin = self.tokenizer.bos_token
        special = special and not (begin and text.startswith(str(begin)))
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    @torch.inference_mode()
    def prompt_logprobs(self, prompt: Sequence[int], num_top: int) -> list[Reported | None]:
        """Log-probabilities of each token after those before it; None for the first.

        A long prompt is read once for every `MOST_LOGITS` of its logits.
        """
        device = next(self.model.parameters()).device
        ids = torch.tensor(list(prompt), device=device)
        policy = Policy(self.model)
        part = max(1, MOST_LOGITS // self.vocabulary)
        found: list[Reported | None] = [None]
        for first in range(1, len(prompt), part):
            last = min(first + part, len(prompt))
            batch = TokenBatch(ids[:last], (last,), torch.arange(first, last, device=device))
            logits = policy.logits(batch)
            found += reported(logits, list(prompt[first:last]), [num_top] * (last - first))
        return found


def vocabulary_of(model: PreTrainedModel) -> int:
    """Number of tokens that a model knows."""
    return model.get_input_embeddings().weight.shape[0]  # pyright: ignore[reportReturnType, reportOptionalMemberAccess, reportAttributeAccessIssue, reportIndexIssue]


@dataclass(frozen=True)
class ServedReward:
    """A reward model with the chat format that was saved with it."""

    name: str
    scorer: Scorer
    chat: ChatFormat

    def encode(self, messages: Sequence[Message]) -> Encoded:
        """Token ids of a dialogue that ends in a response.

        Raises:
            ApiError: it doesn't, or is too long, or the template can't render it.
        """
        if messages[-1].role != "assistant" or len(messages) < 2:
            raise ApiError(400, "messages must end in the assistant's turn", param="messages")
        try:
            encoded = self.chat.encode(messages[:-1], messages[-1:])
        except UserError as error:
            raise ApiError(400, str(error), param="messages") from None
        limit = context_length(base_model(self.scorer.model))
        if len(encoded) > limit:
            raise ApiError(
                400,
                f"the dialogue has {len(encoded)} tokens, and {self.name} reads {limit};"
                " shorten it",
                param="messages",
                code="context_length_exceeded",
            )
        return encoded

    @torch.inference_mode()
    def score(self, dialogue: Encoded) -> float:
        """The score of a dialogue's last response."""
        batch = collate([dialogue]).to(local_device())
        return self.scorer.final_scores(batch).item()


def load_reward(path: str) -> ServedReward:
    """Load the reward model at `path`.

    Raises:
        ModelError: there is none, or it has no trained score head.
    """
    scorer, chat = load_scorer(path)
    scorer.requires_grad_(requires_grad=False)
    return ServedReward("reward", scorer, chat)
