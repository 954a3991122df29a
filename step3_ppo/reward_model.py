"""The reward model, alone or pooled, and the text it reads where its tokenizer is another one."""

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from evaluation.held_out import Prompt
from inference.engine.requests import Response
from pipeline.config import FrozenModelConfig, ParallelConfig, TrainedModelConfig
from pipeline.data.batches import TokenBatch
from pipeline.data.chat.chat_format import ChatFormat, Messages
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Encoded, Message
from pipeline.models.chat import decode_response, speaks_alike
from pipeline.models.forward import Scorer, base_model
from pipeline.models.load import load_tokenizer
from pipeline.models.passes import frozen_passes
from pipeline.models.scores import response_scores
from pipeline.models.trained import evaluating
from pipeline.parallel.mesh import current_mesh
from pipeline.system.errors import ConfigError
from rewards.config import Pool
from step3_ppo.episodes import EpisodeResponse

logger = logging.getLogger(__name__)


CHANCE = 0.55
"""Held-out accuracy of a reward model at which a policy has nothing to climb."""


class RewardText:
    """Turns the actor's tokens into the tokens that the reward model reads, by way of the text.

    A prompt is the dialogue it was made from, so that no text is lost on the way; the response is
    decoded. Both are rendered by the reward model's own chat template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat: ChatFormat, *, max_tokens: int
    ) -> None:
        self.tokenizer = tokenizer
        """The actor's."""
        self.chat = chat
        """The reward model's."""
        self.max_tokens = max_tokens
        """What the reward model reads; longer dialogues lose their beginning."""
        self._dialogues: dict[tuple[int, ...], Messages] = {}

    def know(self, prompts: Iterable[Prompt]) -> None:
        """Remember the dialogues behind prompts, which are handed around as the actor's tokens."""
        self._dialogues |= {tuple(each.input_ids): each.messages for each in prompts}

    def encode(self, prompt: Sequence[int], response: Response) -> Encoded:
        """What the reward model reads of a response; without an end where the response has none."""
        if isinstance(response, EpisodeResponse):
            *before, answer = (*response.opening, *response.turns)
        else:
            before = self._dialogues[tuple(prompt)]
            answer = Message("assistant", decode_response(self.tokenizer, response.ids))
        whole = self.chat.encode(before, [answer])
        if not response.stopped and whole.input_ids[-1] in self.chat.stop_ids:
            whole = whole.head(len(whole) - 1)
        return whole.tail(self.max_tokens, keep_first=self.chat.begins_with_cls)


def text_format(tokenizer: PreTrainedTokenizerBase, reward: FrozenModelConfig) -> ChatFormat | None:
    """The chat format of a reward model that reads text; None where it reads the actor's tokens.

    Raises:
        ModelError: it has another tokenizer and no chat template.
    """
    own = load_tokenizer(reward)
    if speaks_alike(tokenizer, own, str(reward.path)):
        return None
    return resolve_format(own, "auto")


class RewardModel:
    """A frozen reward model, with the mean and standard deviation that step 2 stored, if any.

    It is sharded, and cut into stages, like the critic, or like the actor if there is no critic.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        like: TrainedModelConfig,
        text: RewardText | None = None,
        *,
        name: str = "reward model",
        parallel: ParallelConfig | None = None,
    ) -> None:
        self.engine, self.passes = frozen_passes(
            model,
            like,
            parallel or ParallelConfig(),
            current_mesh(),
            lambda whole: Scorer(whole, kernels=like.kernels),
            name=name,
        )
        self.settings = base_model(model).config
        self.text = text
        """Set if it has a tokenizer or a chat template of its own."""
        self.mean, self.std = stored_normalization(model)
        self.has_moments = has_moments(model)

    def scores(self, batches: Sequence[TokenBatch]) -> list[Float[Tensor, " B"]]:
        """Raw score of each sequence of each batch, read at its last token or where steps end."""
        with evaluating(self.engine.model):
            return self.passes.forward_everywhere(
                batches,
                lambda batch: response_scores(self.engine(batch), batch, self.settings),
                lambda batch: (len(batch.lengths),),
            )

    def normalized(self, scores: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Scores with mean 0 and variance 1 over step 1's responses."""
        return (scores - self.mean) / self.std


class PooledRewardModel(RewardModel):
    """A reward model and others, whose normalized scores are pooled into one.

    Its raw score is already normalized: its mean is 0, its deviation 1.

    Raises:
        ConfigError: one of them reads text, or has no stored mean and deviation.
    """

    def __init__(
        self, members: Sequence[tuple[str, RewardModel]], pool: Pool, pool_lambda: float
    ) -> None:
        for path, member in members:
            if member.text is not None:
                raise ConfigError(
                    f"the reward model {path} has a tokenizer or a chat template of its own; models"
                    " that are pooled read the actor's tokens: leave it out of members"
                )
            if not member.has_moments:
                raise ConfigError(
                    f"the reward model {path} has no score_mean and score_std in its config.json,"
                    " without which scores can't be pooled; train it with step 2"
                )
        self.members = [member for _, member in members]
        self.pool: Pool = pool
        self.pool_lambda = pool_lambda
        self.engine, self.passes = self.members[0].engine, self.members[0].passes
        self.text = None
        self.mean, self.std, self.has_moments = 0.0, 1.0, True

    def scores(self, batches: Sequence[TokenBatch]) -> list[Float[Tensor, " B"]]:
        """Pooled score of each sequence of each batch."""
        found = [
            [member.normalized(each).float() for each in member.scores(batches)]
            for member in self.members
        ]
        together = zip(*found, strict=True)
        return [pooled(torch.stack(each), self.pool, self.pool_lambda) for each in together]


def pooled(scores: Float[Tensor, "M B"], pool: Pool, pool_lambda: float) -> Float[Tensor, " B"]:
    """One score of each response from those of several models (Coste et al. 2024, 2310.02743).

    Args:
        scores: on one scale.
        pool: mean; uwo, mean - pool_lambda * (biased) variance over the M models; min, the worst
            case (WCO).
        pool_lambda: of uwo.
    """
    if pool == "min":
        return scores.amin(dim=0)
    mean = scores.mean(dim=0)
    return mean if pool == "mean" else mean - pool_lambda * scores.var(dim=0, correction=0)


def has_moments(model: nn.Module) -> bool:
    """Whether step 2 stored mean and standard deviation of the score with the model."""
    settings = base_model(model).config
    return all(getattr(settings, name, None) is not None for name in ("score_mean", "score_std"))


def stored_normalization(model: nn.Module) -> tuple[float, float]:
    """Mean and standard deviation in the model's config.json; 0 and 1 where it has none."""
    settings = base_model(model).config
    return float(getattr(settings, "score_mean", 0.0)), float(getattr(settings, "score_std", 1.0))


def check_reward_model(path: str | None) -> None:
    """Warn where step 2's result beside the reward model says that it is near chance."""
    result = _result(path)
    accuracy, pairs = result.get("accuracy_after"), result.get("pairs")
    if not isinstance(accuracy, int | float):
        return
    count = float(pairs) if isinstance(pairs, int | float) else 0.0
    # Two standard errors of guessing; few pairs can't tell a weak model from none.
    chance = max(CHANCE, 0.5 + 1 / math.sqrt(count)) if count > 0 else CHANCE
    if accuracy < chance:
        logger.warning(
            "the reward model orders %.1f %%%s held-out pairs right, where guessing gives 50 %%:"
            " there is next to nothing to climb; train step 2 on more pairs first",
            100 * accuracy,
            f" of {count:.0f}" if count > 0 else " of",
        )


def _result(path: str | None) -> Mapping[str, Any]:
    """The `eval` object that step 2 left in the reward model's directory; empty without one."""
    try:
        result = json.loads((Path(path or "") / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found = result.get("eval") if isinstance(result, dict) else None
    return found if isinstance(found, dict) else {}
