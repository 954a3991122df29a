"""The reward model beside the actors: scores of dialogues."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inference.serve.errors import ApiError
from pipeline.data.batches import collate
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Encoded, Message
from pipeline.errors import UserError
from pipeline.models.forward import Scorer, base_model, context_length
from pipeline.models.reward_model import load_scorer
from pipeline.parallel.device import local_device


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
            whole = self.chat.encode(messages[:-1], messages[-1:])
        except UserError as error:
            raise ApiError(400, str(error), param="messages") from None
        limit = context_length(base_model(self.scorer.model))
        if len(whole) > limit:
            raise ApiError(
                400,
                f"the dialogue has {len(whole)} tokens, and {self.name} reads {limit}; shorten it",
                param="messages",
                code="context_length_exceeded",
            )
        return whole

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
