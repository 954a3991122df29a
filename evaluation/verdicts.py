"""Responses of several models to the same prompts, and which of two is better."""

import itertools
from collections.abc import Sequence

import numpy as np

from evaluation.comparison import Match
from evaluation.winrate_config import WinrateConfig
from inference.files.prompts import Prompt
from inference.files.responses import Responder
from inference.settings import Sampling
from pipeline.config import RowColumns
from pipeline.data.examples import Example
from pipeline.models.load import load_for_inference
from pipeline.models.reward_model import score_responses
from rewards.contract import Episode
from rewards.judge import pairwise_judge
from rewards.mixture import Rewards
from rewards.prompts import episode_of
from rewards.sources import read_sources, row_columns
from rewards.workers import RewardError


def columns_read(config: WinrateConfig) -> RowColumns:
    """Columns of the rows that the judge reads.

    Raises:
        ConfigError: it can't be used.
    """
    source = config.source
    if source.kind == "model":
        return RowColumns()
    if source.kind == "judge":
        judge = pairwise_judge(
            source, cache_dir=config.cache_dir, timeout_seconds=config.timeout_seconds
        )
        return RowColumns(needed=judge.columns)
    return row_columns(read_sources([source]))


def responses_of(path: str, examples: Sequence[Example], config: WinrateConfig) -> list[Episode]:
    """What the model at `path` responds to each prompt.

    Raises:
        ModelError: there is no model.
        DataError: a prompt is too long for it.
    """
    sampling = Sampling(
        max_new_tokens=config.max_new_tokens, temperature=config.temperature, seed=config.seed
    )
    responder = Responder(*load_for_inference(path), sampling)
    encoded = [responder.encode(Prompt(None, each.prompt, None, each.origin)) for each in examples]
    rows = responder.responses(encoded, first_row=0, batch_size=config.batch_size)
    return [episode_of(examples[slot], response, slot) for slot, (response,) in enumerate(rows)]


def matches(responses: Sequence[Sequence[Episode]], config: WinrateConfig) -> list[Match]:
    """Every two models, the later one first, on all prompts.

    Raises:
        RewardError: more verdicts failed than `max_failures` allows.
    """
    pairs = [(theirs, ours) for ours, theirs in itertools.combinations(range(len(responses)), 2)]
    longer = [np.array([float(len(each.response)) for each in of_model]) for of_model in responses]
    if config.source.kind == "judge":
        points = _by_judge(responses, pairs, config)
    else:
        rewards = [_rewards(of_model, config) for of_model in responses]
        points = [_by_rewards(rewards[ours], rewards[theirs]) for ours, theirs in pairs]
    return [
        Match(ours, theirs, of_pair, longer[ours] - longer[theirs])
        for (ours, theirs), of_pair in zip(pairs, points, strict=True)
    ]


def _by_judge(
    responses: Sequence[Sequence[Episode]], pairs: Sequence[tuple[int, int]], config: WinrateConfig
) -> list[np.ndarray]:
    judge = pairwise_judge(
        config.source, cache_dir=config.cache_dir, timeout_seconds=config.timeout_seconds
    )
    found = []
    for ours, theirs in pairs:
        outcomes = judge.compare(responses[ours], responses[theirs])
        failures = [each.failure for each in outcomes if each.failure is not None]
        if len(failures) > config.max_failures * len(outcomes):
            raise RewardError(
                f"the judge failed on {len(failures)} of {len(outcomes)} prompts, more than"
                f" --max-failures {config.max_failures:g} allows; the first failure: {failures[0]}"
            )
        found.append(_numbers([each.value for each in outcomes]))
    return found


def _rewards(responses: Sequence[Episode], config: WinrateConfig) -> np.ndarray:
    """What a reward model or program gives for a model's responses; NaN where nothing is known."""
    source = config.source
    if source.kind == "model":
        assert source.path is not None
        dialogues = [(each.prompt, each.response) for each in responses]
        return np.array(score_responses(source.path, dialogues))
    with Rewards(
        [source],
        timeout_seconds=config.timeout_seconds,
        workers=config.workers,
        max_failures=config.max_failures,
        cache_dir=config.cache_dir,
    ) as rewards:
        rewards.submit(responses)
        (scored,) = rewards.checked_results().values()
    return _numbers(scored.values)


def _by_rewards(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """1, 0.5 or 0 by the higher reward; NaN where one is not known."""
    points = (ours > theirs) + 0.5 * (ours == theirs)
    return np.where(np.isnan(ours) | np.isnan(theirs), np.nan, points)


def _numbers(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values])
