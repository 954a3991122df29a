"""Models that are served: weights, tokenizer, batch; and the reward model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.engine.batch import OpenBatch
from inference.engine.sampling import Reported, reported
from inference.serve.http import ApiError
from inference.text import TokenBytes
from pipeline.data.batches import TokenBatch, collate
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.chat.resolve_format import Argument, never_read, resolve_format
from pipeline.data.examples import Encoded, Message
from pipeline.models.forward import Policy, Scorer, base_model, context_length
from pipeline.models.reward_model import load_scorer
from pipeline.parallel.device import local_device
from pipeline.system.errors import UserError

MOST_LOGITS = 2**26
"""Logits of one pass over a prompt: 256 MiB of fp32, and as much again for log-probabilities."""


@dataclass(frozen=True)
class ServedModel:
    """A model with a name."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat

    batch: OpenBatch
    """Used by the generation thread alone."""

    num_slots: int

    context: int
    """Most tokens of prompt and response."""

    weights_hash: str
    bytes_of: TokenBytes

    @property
    def vocabulary(self) -> int:
        """Number of token ids of the model."""
        return self.model.get_input_embeddings().weight.shape[0]  # pyright: ignore[reportReturnType, reportOptionalMemberAccess, reportAttributeAccessIssue, reportIndexIssue]

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        continues: bool,
        opens: bool = True,
        arguments: Mapping[str, Argument] | None = None,
    ) -> list[int]:
        """Return the token ids of a dialogue as a prompt.

        Args:
            messages: the dialogue.
            continues: whether its last turn, the assistant's, is unfinished.
            opens: whether, otherwise, the generation prompt follows a user's turn.
            arguments: of the chat template.

        Raises:
            ApiError: the template can't render it or doesn't read an argument, or the last turn has
                the wrong role.
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
        """Return the token ids of a text, after the tokenizer's first special tokens."""
        begin = self.tokenizer.bos_token
        special = special and not (begin and text.startswith(str(begin)))
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    @torch.inference_mode()
    def prompt_logprobs(self, prompt: Sequence[int], num_top: int) -> list[Reported | None]:
        """Return the log-probability of each token given the preceding ones; None for the first.

        A long prompt is read once for every `MOST_LOGITS` of its logits.
        """
        device = next(self.model.parameters()).device
        ids = torch.tensor(list(prompt), device=device)
        policy = Policy(self.model)
        step = max(1, MOST_LOGITS // self.vocabulary)
        result: list[Reported | None] = [None]
        for first in range(1, len(prompt), step):
            last = min(first + step, len(prompt))
            batch = TokenBatch(ids[:last], (last,), torch.arange(first, last, device=device))
            logits = policy.logits(batch)
            result += reported(logits, list(prompt[first:last]), [num_top] * (last - first))
        return result


@dataclass(frozen=True)
class ServedReward:
    """A reward model with the chat format that was saved with it."""

    name: str
    scorer: Scorer
    chat: ChatFormat

    def encode(self, messages: Sequence[Message]) -> Encoded:
        """Return the token ids of a dialogue that ends in a response.

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
        """Return the score of a dialogue's last response."""
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
