"""A reward model that scores texts, with the chat format that was saved with it."""

from collections.abc import Sequence

import torch

from pipeline.config import FrozenModelConfig
from pipeline.data.batches import collate
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Message
from pipeline.models.forward.forward import Scorer, base_model, context_length
from pipeline.models.forward.scores import require_score
from pipeline.models.hf.load import load_reward
from pipeline.parallel.device import local_device

BATCH_SIZE = 16
"""Number of responses scored in one pass."""


def load_scorer(reward: str | FrozenModelConfig) -> tuple[Scorer, ChatFormat]:
    """Load a reward model, given its path or settings, and the chat format saved with it.

    Raises:
        ModelError: there is no model, its score head is untrained, or `class_values` is missing.
    """
    config = FrozenModelConfig(path=reward) if isinstance(reward, str) else reward
    model, tokenizer = load_reward(config)
    require_score(model)
    return Scorer(model), resolve_format(tokenizer, "auto")


def score_responses(
    reward: str | FrozenModelConfig,
    dialogues: Sequence[tuple[Sequence[Message], str]],
    stopped: Sequence[bool] = (),
) -> list[float]:
    """Score each response to its prompt with a reward model, given its path or settings.

    The model's own chat format is used; texts that are too long are truncated at the beginning.
    `stopped` is false for unfinished responses; by default, all are finished.
    """
    scorer, chat = load_scorer(reward)
    limit = context_length(base_model(scorer.model))
    flags = stopped or [True] * len(dialogues)
    rows = [
        chat.encode_scored(prompt, Message("assistant", text), stopped=flag, max_length=limit)
        for (prompt, text), flag in zip(dialogues, flags, strict=True)
    ]
    # Batch similar lengths together, since some families pad their batches.
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    scores = [0.0] * len(rows)
    with torch.no_grad():
        for first in range(0, len(order), BATCH_SIZE):
            indices = order[first : first + BATCH_SIZE]
            batch = collate([rows[row] for row in indices]).to(local_device())
            for row, score in zip(indices, scorer.final_scores(batch).tolist(), strict=True):
                scores[row] = score
    return scores
