"""Episodes of several turns: tokens, limits, failures."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.engine.batch import OpenBatch
from inference.engine.requests import Request, Ticket
from pipeline.data.examples import Message
from step3_ppo.config import PPOConfig
from step3_ppo.episodes import EpisodeResponse
from step3_ppo.experience import score_responses
from step3_ppo.metrics import episode_statistics
from step3_ppo.models import Models
from step3_ppo.reward_sources import RewardSources, Submitting
from step3_ppo.rewards import compute_rewards
from step3_ppo.rollout import PromptBatch, generate_responses, sampled_responses
from tests.distributed import rank, run_ranks, world_size
from tests.step3_ppo.games import game_config, game_models, rows
from tests.step3_ppo.toy import END


@contextmanager
def playing(config: PPOConfig) -> Iterator[Models]:
    """The models, with workers that play."""
    with RewardSources(config) as sources:
        yield game_models(config, sources)


def played(
    models: Models, config: PPOConfig, *extra: dict[str, Any], first: int = 0
) -> list[EpisodeResponse]:
    """An episode for each row; keys from `first` on."""
    keys = range(first, first + len(extra))
    batch = PromptBatch(groups=[], prompts=rows(models, *extra), rows=[], keys=list(keys))
    submit = Submitting(models.sources, batch.prompts, models.chat)
    episodes = sampled_responses(models, batch, config, on_response=submit)
    assert all(isinstance(each, EpisodeResponse) for each in episodes)
    return [each for each in episodes if isinstance(each, EpisodeResponse)]


def answer_ids(episode: EpisodeResponse) -> list[list[int]]:
    """The tokens of each answer."""
    turns: list[list[int]] = []
    before = False
    for token, trained in zip(episode.sequence.input_ids, episode.sequence.trained, strict=True):
        if trained:
            turns[-1].append(token) if before else turns.append([token])
        before = trained
    return turns


def test_an_environment_of_one_turn_is_the_plain_rollout(toy: Path) -> None:
    config = game_config(toy, "Plain")
    plain = replace(config, environment=None, rewards=(), missing_eos_score=None)
    with playing(config) as models:
        prompts = rows(models, *[{}] * 8)
        inputs = [prompt.input_ids for prompt in prompts]
        expected = generate_responses(models, inputs, plain, keys=range(8))

        episodes = played(models, config, *[{}] * 8)

        assert [each.ids for each in episodes] == [each.ids for each in expected]
        assert [each.stopped for each in episodes] == [each.stopped for each in expected]
        assert any(each.stopped for each in expected)
        one = score_responses(models, inputs, episodes, config)
        other = score_responses(models, inputs, expected, config)
    assert one.sequences == other.sequences
    assert torch.allclose(one.sampled_logprobs, other.sampled_logprobs, atol=1e-5)
    for name in ("mask", "logprobs", "ref_logprobs", "entropy", "stopped"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


def test_what_was_sampled_is_never_encoded_again_and_observations_come_as_the_format_cuts_them(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tickets: list[Ticket] = []

    class Recording(OpenBatch):
        def submit(self, request: Request) -> Ticket:
            tickets.append(super().submit(request))
            return tickets[-1]

    monkeypatch.setattr("step3_ppo.episodes.OpenBatch", Recording)
    config = game_config(toy, "Counting")
    with playing(config) as models:
        chat = models.chat
        episodes = played(models, config, *[{"turns": 3}] * 8)
        opening = [chat.encode_prompt(each.opening) for each in episodes]
        between = chat.encode_observation(
            (*episodes[0].opening, Message("assistant", "x")), [Message("user", "go on")]
        )
        experience = score_responses(models, opening, episodes, config)

    # The last token of a response is read with the observation.
    read = {len(each.request.prompt) - each.num_reused for each in tickets[8:] if each.num_reused}
    assert read == {1 + len(between)}
    encoded_alike = 0
    for episode, begin in zip(episodes, opening, strict=True):
        turns = answer_ids(episode)
        expected = [*begin, *turns[0]]
        for turn in turns[1:]:
            expected += [*between, *turn]
        assert episode.sequence.input_ids == expected
        assert [token for turn in turns for token in turn] == episode.ids
        assert all(turn[-1] == END for turn in turns[:-1])
        texts = [turn.content for turn in episode.turns if turn.role == "assistant"]
        for turn, text in zip(turns, texts, strict=True):
            again = chat.tokenizer(text, add_special_tokens=False)["input_ids"]
            encoded_alike += again == [token for token in turn if token != END]
    # The trap: tokens of a random model are often not those that their text has.
    assert encoded_alike < sum(each.num_turns for each in episodes)
    gap = (experience.sampled_logprobs - experience.logprobs)[experience.mask].abs().max()
    assert gap < 1e-5


def test_limits_end_an_episode_without_its_environment_s_consent(toy: Path) -> None:
    endless = {"turns": 99}
    config = game_config(toy, "Counting", max_turns=2)
    with playing(config) as models:
        by_turns = played(models, config, *[endless] * 8)
        short = replace(config, max_turns=50)
        by_tokens = played(models, short, *[endless] * 8)
        figures = episode_statistics(by_tokens, short)

    ended = [each for each in by_turns if each.end == "turns"]
    assert ended
    for each in ended:
        assert each.num_turns == 2
        assert not each.stopped
        assert each.turns[-1].role == "assistant"
        assert each.verdict.parts["turns"] == pytest.approx(0.2)  # both answers were judged
    assert {each.end for each in by_tokens} == {"tokens"}
    for each in by_tokens:
        after = len(each.sequence) - each.sequence.trained.index(True)
        assert after <= 40
        assert each.sequence.trained[-1]  # no final observation without a response
    assert figures["ended_by_tokens"] == 1.0
    assert figures["turns"] == sum(each.num_turns for each in by_tokens) / 8
    observed = sum(len(each.sequence) - len(each.ids) for each in by_tokens)
    openings = sum(each.sequence.trained.index(True) for each in by_tokens)
    assert figures["observation_length"] == (observed - openings) / 8


FAILURES = {
    "reset": "reset raised ValueError: no game today",
    "long": "reset returned .* tokens, more than ppo.max_prompt_length 24",
    "step": "step raised KeyError: 'lost'",
    "hang": "step took longer than 1 s",
    "exit": "step terminated its process, with code 3",
    "text": "step returned str 'higher', not a list of messages",
    "assistant": "step returned an assistant message|did not return a user message",
    "nan": "it returned nan, which is not finite",
    "word": "it returned str 'good' instead",
}
"""Faults of an environment, and the error message of each."""


def test_what_fails_in_an_environment_is_masked_and_said_and_costs_nobody_else(toy: Path) -> None:
    config = game_config(toy, "Broken", reward_timeout=1.0, max_reward_failures=1.0, group_size=2)
    with playing(config) as models:
        whole: list[dict[str, Any]] = [{"how": None, "turns": 2}] * (len(FAILURES) + 1)
        extra = [*({"how": how, "turns": 2} for how in FAILURES), *whole]
        episodes = played(models, config, *extra)
        score = torch.tensor([each.stopped for each in episodes])
        rewards = compute_rewards(models, None, score, config)

    for how, sentence, episode in zip(FAILURES, FAILURES.values(), episodes, strict=False):
        assert len(episode.ids) > 0, how
        if episode.end == "tokens":  # its answer was cut off, and never judged
            continue
        assert episode.verdict.outcome.value is None
        failure = episode.verdict.outcome.failure or ""
        assert re.search(sentence, failure), (how, failure)
    known = rewards.known.tolist()
    assert known[len(FAILURES) :] == [True] * len(whole)
    assert not any(
        is_known
        for is_known, each in zip(known, episodes[: len(FAILURES)], strict=False)
        if each.end != "tokens"
    )
    assert episodes[0].opening[-1].content == "hi"  # the row's own prompt, answered
    figures = rewards.metrics()
    assert figures["reward_failures"] == pytest.approx(known.count(False) / len(known))


def share(directory: str) -> list[tuple[list[int], float | None]]:
    """Two groups of four on one process, or one on each of two."""
    config = game_config(Path(directory), "Counting")
    groups = range(rank(), 2, world_size())
    with playing(config) as models:
        found: list[EpisodeResponse] = []
        for group in groups:
            found += played(models, config, *[{}] * 4, first=4 * group)
        models.sources.results()
    return [(each.sequence.input_ids, each.verdict.outcome.value) for each in found]


@pytest.mark.jobs
def test_two_processes_play_what_one_plays(toy: Path) -> None:
    game_config(toy, "Counting")  # writes the files that both read
    expected = share(str(toy))

    first, second = run_ranks(share, str(toy))

    assert [*first, *second] == expected
