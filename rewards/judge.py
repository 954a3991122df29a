"""A language model behind an OpenAI-compatible endpoint that scores responses one by one.

Answers are kept on disk by what was asked, so that a resumed run repeats no request and gets the
same rewards.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rewards.answers import Answers
from rewards.config import RewardConfig
from rewards.contract import Episode, Outcome
from rewards.endpoint import Endpoint, EndpointError
from rewards.judgement import NoScoreError, question, score_in, shortened
from rewards.scorer import Scorer

MAX_TOKENS = 1024
"""Of the judge's answer: it may think before it gives its score."""


def judge_scorer(config: RewardConfig, template: str, endpoint: Endpoint, kept: Answers) -> Scorer:
    """Scores the episodes of a call by as many requests at once as the settings allow."""

    def score(episode: Episode) -> Outcome:
        body = request(config, question(config, template, episode))
        try:
            score = answered(endpoint, kept, body, lambda text: score_in(text, config.scale))
        except (EndpointError, NoScoreError) as error:
            return Outcome.failed(str(error))
        return Outcome(score)

    def all_at_once(episodes: Sequence[Episode]) -> list[Outcome]:
        # Threads wait for the network alone; the deadline is kept by the process around them.
        with ThreadPoolExecutor(config.concurrency) as threads:
            return list(threads.map(score, episodes))

    return Scorer(all_at_once, batched=True)


def request(config: RewardConfig, text: str) -> dict[str, Any]:
    """The body of a request, always the same for the same question."""
    return {
        "model": config.model or "",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }


def answered(
    endpoint: Endpoint, kept: Answers, body: Mapping[str, Any], read: Callable[[str], float]
) -> float:
    """What `read` finds in the judge's message; an answer that it can't use is not kept.

    Raises:
        EndpointError: there is no answer, or no message in it.
        NoScoreError: as `read`.
    """
    query = {"url": endpoint.url, "body": body}
    before = kept.get(query)
    answer = endpoint.post(body) if before is None else before
    value = read(text_of(answer))
    if before is None:
        kept.put(query, answer)
    return value


def text_of(answer: object) -> str:
    """The message in an endpoint's answer.

    Raises:
        EndpointError: there is none.
    """
    try:
        text = answer["choices"][0]["message"]["content"]  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str):
        raise EndpointError(f"the judge's answer has no message: {shortened(answer)}")
    return text
