"""Sampled answers to prompts, with their rewards."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from inference.files.prompts import Prompt
from inference.files.responses import Responder, TextResponse
from inference.settings import Sampling
from pipeline.data.examples import Example
from pipeline.models.load import load_for_inference
from pipeline.models.reward_model import score_responses
from pipeline.progress import Progress
from rewards.config import RewardConfig
from rewards.contract import Episode, Scored
from rewards.mixture import Rewards, weighted_sum, without_failures
from rewards.prompts import episode_of
from rewards.selection import Candidate, SelectConfig

logger = logging.getLogger(__name__)

MODEL = "model"
"""The kind of a source that is a reward model, which scores here and in no worker process."""


@dataclass(frozen=True)
class Sampled:
    """All answers."""

    candidates: list[list[Candidate]]
    """By prompt."""

    failed: Mapping[str, int]
    """By source, the answers that it failed on."""


def sampled_candidates(examples: Sequence[Example], config: SelectConfig) -> Sampled:
    """`best_of` answers to each prompt, and what each is worth: the weighted sum of the sources.

    Raises:
        DataError: a prompt is too long for the model.
        RewardError: a source failed on more answers than `max_failures` allows.
    """
    sources = config.sources
    programs = programs_of(sources)
    if programs:
        answers, given = _scored_answers(examples, config, programs)
    else:
        answers, given = _answers(examples, config, lambda _: None), {}
    scored = [
        given[source.name] if source.kind != MODEL else _by_model(source, examples, answers)
        for source in sources
    ]
    failed = {name: each.num_failed for name, each in given.items()}
    return Sampled(_candidates(answers, scored, [source.weight for source in sources]), failed)


def _scored_answers(
    examples: Sequence[Example], config: SelectConfig, programs: Sequence[RewardConfig]
) -> tuple[list[list[TextResponse]], dict[str, Scored]]:
    """The answers to each prompt, and by source what programs gave for all of them."""
    with Rewards(
        programs,
        timeout_seconds=config.timeout_seconds,
        workers=config.workers,
        max_failures=config.max_failures,
        cache_dir=config.cache_dir,
    ) as rewards:
        for note in rewards.notes:
            logger.info("%s", note)
        answers = _answers(examples, config, rewards.submit)
        return answers, rewards.checked_results()


def _answers(
    examples: Sequence[Example],
    config: SelectConfig,
    submit: Callable[[Sequence[Episode]], None],
) -> list[list[TextResponse]]:
    """The answers to each prompt; those to one are submitted while others are sampled."""
    sampling = Sampling(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        seed=config.seed,
    )
    responder = Responder(*load_for_inference(config.path), sampling, num_samples=config.best_of)
    prompts = [Prompt(None, each.prompt, None, each.origin) for each in examples]
    encoded = [responder.encode(prompt) for prompt in prompts]
    answers: list[list[TextResponse]] = []
    progress = Progress("select", len(prompts))
    progress.start()
    began = time.perf_counter()
    try:
        rows = responder.responses(encoded, first_row=0, batch_size=config.batch_size)
        for row, of_prompt in enumerate(rows):
            answers.append(of_prompt)
            first = row * config.best_of
            submit(
                [
                    episode_of(examples[row], answer, slot)
                    for slot, answer in enumerate(of_prompt, start=first)
                ]
            )
            progress.update(row + 1, {}, seconds=time.perf_counter() - began)
    finally:
        progress.stop()
    return answers


def _by_model(
    source: RewardConfig, examples: Sequence[Example], answers: Sequence[Sequence[TextResponse]]
) -> Scored:
    """The scores of a reward model, in its own unit."""
    assert source.path is not None
    dialogues = [
        (example.prompt, answer.text)
        for example, of_prompt in zip(examples, answers, strict=True)
        for answer in of_prompt
    ]
    scores = score_responses(source.path, dialogues)
    return Scored([*scores], [None] * len(scores))


def _candidates(
    answers: Sequence[Sequence[TextResponse]], scored: Sequence[Scored], weights: Sequence[float]
) -> list[list[Candidate]]:
    rewards = iter(weighted_sum(without_failures(scored, weights), weights))
    return [
        [Candidate(each.text, next(rewards), each.stop != "length") for each in of_prompt]
        for of_prompt in answers
    ]


def programs_of(sources: Sequence[RewardConfig]) -> list[RewardConfig]:
    """The sources that are no reward model."""
    return [source for source in sources if source.kind != MODEL]
