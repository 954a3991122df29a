"""Rewards of a service, in OpenRLHF's form: {query, prompts, labels} to {rewards}."""

from collections.abc import Sequence
from typing import Any

from rewards.answers import Answers
from rewards.config import RewardConfig
from rewards.contract import Episode, Outcome
from rewards.endpoint import Endpoint, EndpointError
from rewards.forms import prompt_text
from rewards.results import everywhere, member, outcomes_of
from rewards.scorer import Scorer


def remote_scorer(config: RewardConfig, endpoint: Endpoint, kept: Answers) -> Scorer:
    """Scores the episodes of a call by one request, but for those whose reward is known.

    `query` has prompts with their responses, `prompts` the prompts, `labels` the column of the
    rows. The answer is {"rewards": [...]}, in which null says that there is no reward.
    """
    column = config.reads_column or ""

    def query(episode: Episode) -> dict[str, Any]:
        prompt = prompt_text(episode.prompt)
        label = episode.extra.get(column)
        return {"query": prompt + episode.response, "prompts": prompt, "labels": label}

    def score(episodes: Sequence[Episode]) -> list[Outcome]:
        requests = [query(each) for each in episodes]
        known = [kept.get({"url": endpoint.url, **each}) for each in requests]
        missing = [each for each, answer in zip(requests, known, strict=True) if answer is None]
        scored = iter(_posted(endpoint, missing))
        outcomes: list[Outcome] = []
        for each, answer in zip(requests, known, strict=True):
            outcome = next(scored) if answer is None else Outcome(answer["reward"])
            if answer is None and outcome.failure is None:
                kept.put({"url": endpoint.url, **each}, {"reward": outcome.value})
            outcomes.append(outcome)
        return outcomes

    return Scorer(score, batched=True)


def _posted(endpoint: Endpoint, requests: Sequence[dict[str, Any]]) -> list[Outcome]:
    if not requests:
        return []
    body = {name: [each[name] for each in requests] for name in ("query", "prompts", "labels")}
    try:
        answer = endpoint.post(body)
    except EndpointError as error:
        return everywhere(str(error), len(requests))
    return outcomes_of(member(answer, ("rewards",)), len(requests))
