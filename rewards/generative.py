"""A language model of this machine that scores responses one by one, by our own generation.

It reads what a judge behind an endpoint is asked, and decodes greedily: the same model and the same
response give the same score, whatever is scored beside it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.data.examples import Message
from pipeline.data.rows.sources import HUB_NAME
from pipeline.errors import ConfigError, DataError, ModelError
from pipeline.models.directory import check_model_directory
from rewards.config import RewardConfig
from rewards.contract import Episode, Outcome, Scorer
from rewards.judge import NoScoreError, question, score_in

if TYPE_CHECKING:
    from inference.files.responses import Responder

MAX_TOKENS = 256
"""Of the model's answer, where the settings name no other number."""


def check_generative(config: RewardConfig) -> None:
    """Refuse a directory that holds no model, before anything is loaded.

    Raises:
        ConfigError: it is none.
    """
    assert config.path is not None
    if HUB_NAME.fullmatch(config.path) and not Path(config.path).exists():
        return
    try:
        check_model_directory(config.path)
    except ModelError as error:
        raise ConfigError(f"rewards.{config.name}.path names no model: {error}") from None


def generative_scorer(config: RewardConfig, template: str) -> Scorer:
    """Loads the model; all episodes of a call are decoded together.

    Raises:
        ConfigError, ModelError: the model can't be loaded.
    """
    import torch

    from inference.files.responses import Responder
    from inference.settings import Sampling
    from pipeline.models.load import load_for_inference

    assert config.path is not None
    # Training has the other threads: two processes that both wait by spinning stop each other.
    torch.set_num_threads(1)
    sampling = Sampling(max_new_tokens=config.max_tokens or MAX_TOKENS, temperature=0.0)
    responder = Responder(*load_for_inference(config.path), sampling)

    def score(episodes: Sequence[Episode]) -> list[Outcome]:
        outcomes = [Outcome()] * len(episodes)
        prompts: dict[int, list[int]] = {}
        for place, episode in enumerate(episodes):
            try:
                prompts[place] = encoded(
                    responder, question(config, template, episode), config.name
                )
            except DataError as error:
                outcomes[place] = Outcome.failed(str(error))
        batch_size = config.concurrency
        answers = responder.responses([*prompts.values()], first_row=0, batch_size=batch_size)
        for place, (answer,) in zip(prompts, answers, strict=True):
            try:
                outcomes[place] = Outcome(score_in(answer.text, config.scale))
            except NoScoreError as error:
                outcomes[place] = Outcome.failed(str(error))
        return outcomes

    return Scorer(score, batched=True)


def encoded(responder: "Responder", text: str, name: str) -> list[int]:
    """Token ids of a question.

    Raises:
        DataError: it is too long for the model.
    """
    from inference.files.prompts import Prompt

    message = Message("user", text)
    return responder.encode(Prompt(text, (message,), text, f"rewards.{name}: the question"))
