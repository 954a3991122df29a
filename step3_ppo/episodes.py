"""Episodes: responses of several turns, with an environment's observations in between."""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from evaluation.held_out import Prompt
from inference.engine.batch import OpenBatch, supports_slots
from inference.engine.cache import count_pages
from inference.engine.requests import EndEvent, Request, Response, Ticket
from inference.engine.sampling import Sampler
from inference.generation import fitting_pages, free_bytes
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Encoded, Message
from pipeline.models.forward.forward import base_model
from pipeline.models.hf.chat import decode_response
from pipeline.parallel.mesh import current_mesh
from pipeline.system.errors import DataError
from rewards.contract import Outcome
from rewards.environments.pool import CallResult, EnvironmentPool, EnvironmentReward
from step3_ppo.config import PPOConfig

OnResponse = Callable[[int, Response], None]
"""A function that is called with a prompt's index and its response."""

EpisodeEnd = Literal["environment", "turns", "tokens", "failed"]
"""Reason why an episode ended: the environment, the maximum turns or tokens, or a failure."""


ENVIRONMENT_DELAY_STEPS = 8
"""Number of decoding steps after which the batch waits for an environment's reply."""


@dataclass
class EpisodeResponse(Response):
    """A response of several turns; `ids` and `logprobs` cover only the actor's tokens.

    `stopped` is true if the environment ended the episode.
    """

    sequence: Encoded = field(default_factory=lambda: Encoded.untrained([]))
    """The whole episode, including the opening and observations; `ids` are its trained tokens."""

    opening: tuple[Message, ...] = ()
    turns: tuple[Message, ...] = ()
    """Responses and observations after the opening; the last is a response."""

    end: EpisodeEnd = "environment"
    reward: EnvironmentReward = field(default_factory=lambda: EnvironmentReward(Outcome()))
    """Result of the environment's `reward` for the episode."""

    @property
    def num_turns(self) -> int:
        """Number of turns of the actor."""
        return sum(turn.role == "assistant" for turn in self.turns)

    @property
    def observation_length(self) -> int:
        """Number of observation tokens between the actor's responses."""
        return len(self.sequence) - self.sequence.trained.index(True) - len(self.ids)


def episode_seed(seed: int, group: int) -> int:
    """Return the seed of an environment, which is the same for all episodes of a group."""
    digest = hashlib.blake2b(f"{seed} episode {group}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


@dataclass
class _EpisodeState:
    """A running episode."""

    index: int
    """Index of the episode's prompt."""

    env_id: int
    """Id of the episode's environment, unique within the run."""

    prompt: Prompt
    key: int
    episode: EpisodeResponse = field(default_factory=EpisodeResponse)
    limit: int = 0
    """Maximum tokens in the whole sequence, including the opening."""


def run_episodes(
    model: nn.Module,
    chat: ChatFormat,
    environments: EnvironmentPool,
    prompts: Sequence[Prompt],
    config: PPOConfig,
    *,
    temperature: float,
    seed: int,
    keys: Sequence[int],
    group_size: int = 1,
    on_response: OnResponse | None = None,
) -> list[EpisodeResponse]:
    """Run an episode for each prompt, within the limits in the settings; return them in order.

    Args:
        model: a causal language model, plain or with adapters.
        chat: the model's chat format.
        environments: the environments' workers.
        prompts: the rows with which environments are reset.
        config: settings of the step.
        temperature: sampling temperature; 0 is greedy.
        seed: seed of sampling and of the environments.
        keys: each episode's key for sampling.
        group_size: number of episodes per group, whose environments have equal seeds.
        on_response: called with (prompt index, episode) as each episode ends.

    Raises:
        RewardError: the supervisor of the environments has exited.
        ConfigError: there is no room for the keys and values of one sequence.
    """
    sampler = Sampler(temperature=temperature, top_p=1.0, seed=seed, stop_ids=tuple(chat.stop_ids))
    memory = free_bytes(next(model.parameters()).device)
    max_pages = fitting_pages(base_model(model), memory, num_tokens=config.max_length)
    slots = max(1, min(config.generation_batch_size, len(prompts)))
    if not supports_slots(base_model(model)):
        slots = min(slots, (max_pages - 1) // count_pages(config.max_length))
    batch = OpenBatch(
        model,
        num_slots=slots,
        capacity=config.max_length,
        num_pages=min(max_pages, 1 + slots * count_pages(config.max_length)),
        reuse_prefixes=True,  # a turn processes only the tokens since the previous turn
    )
    scheduler = _EpisodeScheduler(batch, chat, environments, sampler, config)
    for index, (prompt, key) in enumerate(zip(prompts, keys, strict=True)):
        scheduler.begin(index, prompt, key=key, seed=episode_seed(seed, key // group_size))
    done: dict[int, EpisodeResponse] = {}
    while scheduler.busy:
        for index, episode in scheduler.advance():
            done[index] = episode
            if on_response is not None:
                on_response(index, episode)
    return [done[index] for index in range(len(prompts))]


class _EpisodeScheduler:
    """Runs episodes concurrently; each waits for either the actor or its environment."""

    def __init__(
        self,
        batch: OpenBatch,
        chat: ChatFormat,
        environments: EnvironmentPool,
        sampler: Sampler,
        config: PPOConfig,
    ) -> None:
        self._batch = batch
        self._chat = chat
        self._environments = environments
        self._sampler = sampler
        self._config = config
        self._generating: dict[Ticket, _EpisodeState] = {}
        self._waiting: deque[tuple[int, _EpisodeState]] = deque()
        """Episodes waiting for their environment, with the step at which they are resumed."""
        self._unrewarded: dict[int, _EpisodeState] = {}
        """Episodes waiting for their reward, by the id of their environment."""
        self._replies: dict[int, CallResult] = {}
        self._steps = 0

    @property
    def busy(self) -> bool:
        """Whether any episode is still running."""
        return bool(self._generating or self._waiting or self._unrewarded)

    def begin(self, index: int, prompt: Prompt, *, key: int, seed: int) -> None:
        """Begin an episode by resetting its environment."""
        row = {**prompt.extra, "dialogue": [message.turn for message in prompt.messages]}
        env_id = self._environments.begin(row, seed=seed)
        self._waiting.append((self._steps, _EpisodeState(index, env_id, prompt, key)))

    def advance(self) -> list[tuple[int, EpisodeResponse]]:
        """Process the environments' replies and one step of the batch; return the ended episodes.

        Which sequences share a pass depends only on the number of steps, not on the clock: if an
        environment has not replied when it is due, the batch waits for it.
        """
        done = [*self._resume_due(), *self._collect_rewarded()]
        if self._batch.busy:
            self._steps += 1
            for event in self._batch.step():
                if isinstance(event, EndEvent):
                    if event.error is not None:
                        raise event.error
                    done += self._end_turn(self._generating.pop(event.ticket), event.ticket)
        return [(state.index, state.episode) for state in done]

    def _resume_due(self) -> list[_EpisodeState]:
        """Resume the episodes whose environments are due; return those that ended."""
        done: list[_EpisodeState] = []
        while self._waiting:
            due, state = self._waiting[0]
            if not self._batch.busy:
                self._steps = max(self._steps, due)  # no other episode is running
            if due > self._steps:
                break
            self._waiting.popleft()
            done += self._apply_reply(state, self._wait_for_reply(state.env_id))
        return done

    def _collect_rewarded(self) -> list[_EpisodeState]:
        """Return the episodes whose rewards have arrived; wait for one if nothing else can run."""
        if not self._unrewarded:
            return []
        self._receive()
        if not (self._batch.busy or self._waiting):
            env_id = next(iter(self._unrewarded))
            self._replies[env_id] = self._wait_for_reply(env_id)
        rewarded = sorted(self._unrewarded.keys() & self._replies.keys())
        return [
            ended
            for env_id in rewarded
            for ended in self._apply_reply(self._unrewarded.pop(env_id), self._replies.pop(env_id))
        ]

    def _receive(self, *, wait: bool = False) -> None:
        self._replies |= {reply.episode: reply for reply in self._environments.receive(wait=wait)}

    def _wait_for_reply(self, env_id: int) -> CallResult:
        """Wait for an environment's reply and return it."""
        while env_id not in self._replies:
            self._receive(wait=True)
        return self._replies.pop(env_id)

    def _apply_reply(self, state: _EpisodeState, reply: CallResult) -> list[_EpisodeState]:
        """Apply an environment's reply; return the episode if it has ended."""
        episode = state.episode
        if reply.reward is not None:
            episode.reward = reply.reward
            if reply.reward.outcome.failure is not None:
                _fail(episode, reply.reward.outcome.failure)
            return [state]
        if not episode.sequence.input_ids:
            self._start(state, reply)
        elif reply.failure is not None:
            _fail(episode, reply.failure)
            return [state]
        elif reply.messages is None:
            episode.stopped = True
            self._finish(state, "environment")
        else:
            return self._observe(state, reply.messages)
        return []

    def _start(self, state: _EpisodeState, reply: CallResult) -> None:
        """Submit the first turn; if the episode can't start, respond to the row's prompt instead.

        A rollout thus always has the full number of responses, all sampled from the policy.
        """
        episode, failure = state.episode, reply.failure
        opening = reply.messages or ()
        ids: list[int] = []
        try:
            ids = self._chat.encode_prompt(opening) if opening else []
        except DataError as error:
            failure = f"the result of reset can't be rendered in the chat format: {error}"
            self._environments.request_reward(state.env_id)
        if len(ids) > self._config.max_prompt_length:
            failure = (
                f"reset returned {len(ids)} tokens, more than ppo.max_prompt_length"
                f" {self._config.max_prompt_length}"
            )
            self._environments.request_reward(state.env_id)
        if failure is not None:
            opening, ids = state.prompt.messages, state.prompt.input_ids
            _fail(episode, failure)
        episode.opening = tuple(opening)
        episode.sequence = Encoded.untrained(list(ids))
        state.limit = min(len(ids) + self._config.max_new_tokens, self._batch.capacity)
        self._submit(state)

    def _observe(self, state: _EpisodeState, messages: tuple[Message, ...]) -> list[_EpisodeState]:
        """Append an observation and submit the next turn, or end the episode at its limit.

        Return the episode if it failed because the chat format can't render the observation.
        """
        episode = state.episode
        if episode.num_turns == self._config.max_turns:
            self._finish(state, "turns")
            return []
        try:
            ids = self._chat.encode_observation((*episode.opening, *episode.turns), messages)
        except DataError as error:
            _fail(episode, f"the result of step can't be rendered in the chat format: {error}")
            self._environments.request_reward(state.env_id)
            return [state]
        if len(episode.sequence) + len(ids) >= state.limit:
            self._finish(state, "tokens")
            return []
        episode.turns += messages
        _append(episode.sequence, ids, trained=False)
        self._submit(state)
        return []

    def _submit(self, state: _EpisodeState) -> None:
        sequence = state.episode.sequence
        request = Request(
            tuple(sequence.input_ids),
            self._sampler,
            state.key,
            state.limit - len(sequence),
            num_drawn=len(state.episode.ids),
        )
        self._generating[self._batch.submit(request)] = state

    def _end_turn(self, state: _EpisodeState, ticket: Ticket) -> list[_EpisodeState]:
        """Request the next reply or the reward; return the episode if it had already failed."""
        episode, response = state.episode, ticket.response
        _append(episode.sequence, response.ids, trained=True)
        episode.ids += response.ids
        episode.logprobs += response.logprobs
        text = decode_response(self._chat.tokenizer, response.text_ids)
        episode.turns += (Message("assistant", text),)
        if episode.end == "failed":
            return [state]
        if response.stopped:
            self._environments.step(state.env_id, text)
            self._waiting.append((self._steps + ENVIRONMENT_DELAY_STEPS, state))
        else:
            self._finish(state, "tokens")
        return []

    def _finish(self, state: _EpisodeState, end: EpisodeEnd) -> None:
        """Record how the episode ended, and request its reward."""
        state.episode.end = end
        self._environments.request_reward(state.env_id)
        self._unrewarded[state.env_id] = state


def _fail(episode: EpisodeResponse, failure: str) -> None:
    episode.end, episode.stopped = "failed", False
    episode.reward = EnvironmentReward(Outcome.failed(failure))


def _append(sequence: Encoded, ids: Sequence[int], *, trained: bool) -> None:
    sequence.input_ids.extend(ids)
    sequence.trained.extend([trained] * len(ids))


def format_transcript(turns: Sequence[Message]) -> str:
    """Return the turns as text; all turns but the actor's are preceded by their role."""
    return "\n".join(
        turn.content if turn.role == "assistant" else f"[{turn.role}] {turn.content}"
        for turn in turns
    )


def run_shared_episodes(
    model: nn.Module,
    chat: ChatFormat,
    environments: EnvironmentPool,
    prompts: Sequence[Prompt],
    config: PPOConfig,
    *,
    keys: Sequence[int],
    group_size: int = 1,
    on_response: OnResponse | None = None,
    **settings: Any,  # noqa: ANN401
) -> list[EpisodeResponse]:
    """Call `run_episodes` on one process, or divide the prompts among the model's processes.

    If the model has several processes, all must call this, and `on_response` is called at the end.
    """
    model_group = current_mesh().model_parallel.untracked
    starts = range(0, len(prompts), group_size)
    groups = model_group.shard([range(i, min(i + group_size, len(prompts))) for i in starts])
    local = [index for group in groups for index in group]
    local_episodes = run_episodes(
        model,
        chat,
        environments,
        [prompts[index] for index in local],
        config,
        keys=[keys[index] for index in local],
        group_size=group_size,
        on_response=on_response if model_group.size == 1 else None,
        **settings,
    )
    if model_group.size == 1:
        return local_episodes
    done: dict[int, EpisodeResponse] = {}
    for gathered in model_group.gather_objects(dict(zip(local, local_episodes, strict=True))):
        done |= gathered
    episodes = [done[index] for index in range(len(prompts))]
    for index, episode in enumerate(episodes):
        if on_response is not None:
            on_response(index, episode)
    return episodes
