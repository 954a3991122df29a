"""Multi-turn episodes: tokens, limits and failures."""

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
from step3_ppo.reward_sources import ResponseSubmitter, RewardSources
from step3_ppo.rewards import compute_rewards
from step3_ppo.rollout import PromptBatch, generate_responses, sample_responses
from tests.distributed import rank, run_ranks, world_size
from tests.step3_ppo.games import game_config, game_models, make_prompts
from tests.step3_ppo.toy import END


@contextmanager
def load_with_workers(config: PPOConfig) -> Iterator[Models]:
    """Yield the toy models, with the environment's workers."""
    with RewardSources(config) as sources:
        yield game_models(config, sources)


def run_episodes(
    models: Models, config: PPOConfig, *extra: dict[str, Any], first: int = 0
) -> list[EpisodeResponse]:
    """Run one episode per row, with keys from `first`."""
    keys = range(first, first + len(extra))
    batch = PromptBatch([], make_prompts(models, *extra), [], list(keys), number=0)
    submit = ResponseSubmitter(models.sources, batch.prompts, models.chat)
    episodes = sample_responses(models, batch, config, on_response=submit)
    assert all(isinstance(episode, EpisodeResponse) for episode in episodes)
    return [episode for episode in episodes if isinstance(episode, EpisodeResponse)]


def answer_ids(episode: EpisodeResponse) -> list[list[int]]:
    """Return the tokens of each answer."""
    turns: list[list[int]] = []
    before = False
    for token, trained in zip(episode.sequence.input_ids, episode.sequence.trained, strict=True):
        if trained:
            turns[-1].append(token) if before else turns.append([token])
        before = trained
    return turns


def test_one_turn_environment_matches_the_plain_rollout(toy: Path) -> None:
    config = game_config(toy, "Plain")
    plain = replace(config, environment=None, rewards=(), missing_eos_score=None)
    with load_with_workers(config) as models:
        prompts = make_prompts(models, *[{}] * 8)
        inputs = [prompt.input_ids for prompt in prompts]
        expected = generate_responses(models, inputs, plain, keys=range(8))

        episodes = run_episodes(models, config, *[{}] * 8)

        assert [e.ids for e in episodes] == [e.ids for e in expected]
        assert [e.stopped for e in episodes] == [e.stopped for e in expected]
        assert any(response.stopped for response in expected)
        actual = score_responses(models, inputs, episodes, config)
        target = score_responses(models, inputs, expected, config)
    assert actual.sequences == target.sequences
    assert torch.allclose(actual.sampled_logprobs, target.sampled_logprobs, atol=1e-5)
    for name in ("mask", "logprobs", "ref_logprobs", "entropy", "stopped"):
        assert torch.equal(getattr(actual, name), getattr(target, name)), name


def test_episodes_keep_sampled_tokens_and_encode_only_observations(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tickets: list[Ticket] = []

    class Recording(OpenBatch):
        def submit(self, request: Request) -> Ticket:
            tickets.append(super().submit(request))
            return tickets[-1]

    monkeypatch.setattr("step3_ppo.episodes.OpenBatch", Recording)
    config = game_config(toy, "Counting")
    with load_with_workers(config) as models:
        chat = models.chat
        episodes = run_episodes(models, config, *[{"turns": 3}] * 8)
        openings = [chat.encode_prompt(episode.opening) for episode in episodes]
        observation = chat.encode_observation(
            (*episodes[0].opening, Message("assistant", "x")), [Message("user", "go on")]
        )
        experience = score_responses(models, openings, episodes, config)

    # The last token of a response is read with the observation.
    read_lengths = {len(t.request.prompt) - t.num_reused for t in tickets[8:] if t.num_reused}
    assert read_lengths == {1 + len(observation)}
    num_equal = 0
    for episode, opening in zip(episodes, openings, strict=True):
        turns = answer_ids(episode)
        expected = [*opening, *turns[0]]
        for turn in turns[1:]:
            expected += [*observation, *turn]
        assert episode.sequence.input_ids == expected
        assert [token for turn in turns for token in turn] == episode.ids
        assert all(turn[-1] == END for turn in turns[:-1])
        texts = [turn.content for turn in episode.turns if turn.role == "assistant"]
        for turn, text in zip(turns, texts, strict=True):
            encoded = chat.tokenizer(text, add_special_tokens=False)["input_ids"]
            num_equal += encoded == [token for token in turn if token != END]
    # The text of a random model is often encoded to other tokens than were sampled.
    assert num_equal < sum(episode.num_turns for episode in episodes)
    gap = (experience.sampled_logprobs - experience.logprobs)[experience.mask].abs().max()
    assert gap < 1e-5


def test_episodes_end_at_turn_and_token_limits(toy: Path) -> None:
    endless = {"turns": 99}
    config = game_config(toy, "Counting", max_turns=2)
    with load_with_workers(config) as models:
        by_turns = run_episodes(models, config, *[endless] * 8)
        short = replace(config, max_turns=50)
        by_tokens = run_episodes(models, short, *[endless] * 8)
        figures = episode_statistics(by_tokens, short)

    ended = [episode for episode in by_turns if episode.end == "turns"]
    assert ended
    for episode in ended:
        assert episode.num_turns == 2
        assert not episode.stopped
        assert episode.turns[-1].role == "assistant"
        assert episode.reward.parts["turns"] == pytest.approx(0.2)  # both answers were scored
    assert {episode.end for episode in by_tokens} == {"tokens"}
    for episode in by_tokens:
        assert len(episode.sequence) - episode.sequence.trained.index(True) <= 40
        assert episode.sequence.trained[-1]  # no final observation without a response
    assert figures["ended_by_tokens"] == 1.0
    assert figures["turns"] == sum(episode.num_turns for episode in by_tokens) / 8
    observed = sum(len(episode.sequence) - len(episode.ids) for episode in by_tokens)
    openings = sum(episode.sequence.trained.index(True) for episode in by_tokens)
    assert figures["observation_length"] == (observed - openings) / 8


FAILURES = {
    "reset": "reset raised ValueError: no game today",
    "long": "reset returned .* tokens, more than ppo.max_prompt_length 24",
    "step": "step raised KeyError: 'lost'",
    "hang": "step took longer than 1 s",
    "exit": "step terminated its process with exit code 3",
    "text": "step returned str 'higher', not a list of messages",
    "assistant": "step returned an assistant message|must return messages that end with",
    "nan": "it returned nan, which is not finite in fp32",
    "word": "it returned str 'good' instead",
}
"""Faults of an environment and their error messages."""


def test_failed_episode_is_masked_and_others_are_unaffected(toy: Path) -> None:
    config = game_config(toy, "Broken", reward_timeout=1.0, max_reward_failures=1.0, group_size=2)
    with load_with_workers(config) as models:
        healthy: list[dict[str, Any]] = [{"how": None, "turns": 2}] * (len(FAILURES) + 1)
        extra = [*({"how": fault, "turns": 2} for fault in FAILURES), *healthy]
        episodes = run_episodes(models, config, *extra)
        score = torch.tensor([episode.stopped for episode in episodes])
        rewards = compute_rewards(models, None, score, config)

    for fault, message, episode in zip(FAILURES, FAILURES.values(), episodes, strict=False):
        assert len(episode.ids) > 0, fault
        if episode.end == "tokens":  # its answer was truncated and not scored
            continue
        assert episode.reward.outcome.value is None
        failure = episode.reward.outcome.failure or ""
        assert re.search(message, failure), (fault, failure)
    known = rewards.known.tolist()
    assert known[len(FAILURES) :] == [True] * len(healthy)
    assert not any(
        is_known
        for is_known, episode in zip(known, episodes[: len(FAILURES)], strict=False)
        if episode.end != "tokens"
    )
    assert episodes[0].opening[-1].content == "hi"  # the row's prompt
    figures = rewards.metrics()
    assert figures["reward_failures"] == pytest.approx(known.count(False) / len(known))


def run_shard(directory: str) -> list[tuple[list[int], float | None]]:
    """Run two groups of four episodes, distributed over the processes."""
    config = game_config(Path(directory), "Counting")
    groups = range(rank(), 2, world_size())
    with load_with_workers(config) as models:
        episodes: list[EpisodeResponse] = []
        for group in groups:
            episodes += run_episodes(models, config, *[{}] * 4, first=4 * group)
        models.sources.results()
    return [(episode.sequence.input_ids, episode.reward.outcome.value) for episode in episodes]


@pytest.mark.jobs
def test_two_processes_run_the_episodes_of_one(toy: Path) -> None:
    game_config(toy, "Counting")  # writes the files that both processes read
    expected = run_shard(str(toy))

    first, second = run_ranks(run_shard, str(toy))

    assert [*first, *second] == expected
