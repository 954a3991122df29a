"""Episodes: responses of several turns, with an environment's observations in between."""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from evaluation.held_out import Prompt
from inference.engine.batch import OpenBatch, takes_slots
from inference.engine.cache import num_pages
from inference.engine.requests import Ended, Request, Ticket
from inference.engine.sampling import Sampler
from inference.generation import Response, free_bytes, pages_within
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
"""Called with a prompt's index and its response."""

End = Literal["environment", "turns", "tokens", "failed"]
"""How an episode ended: by the environment, the maximum turns or tokens, or a failure."""


THINKING_STEPS = 8
"""Steps of the batch before it waits for an environment's move."""


@dataclass
class EpisodeResponse(Response):
    """A response of several turns; `ids` and `logprobs` are those of the actor's tokens only.

    `stopped` says whether the environment ended it.
    """

    sequence: Encoded = field(default_factory=lambda: Encoded.untrained([]))
    """The whole episode, including opening and observations; `ids` are its trained tokens."""

    opening: tuple[Message, ...] = ()
    turns: tuple[Message, ...] = ()
    """Responses and observations after the opening; the last is a response."""

    end: End = "environment"
    verdict: EnvironmentReward = field(default_factory=lambda: EnvironmentReward(Outcome()))
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
    """Seed of an environment, equal for all episodes of a group."""
    digest = hashlib.blake2b(f"{seed} episode {group}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


@dataclass
class _Playing:
    """A running episode."""

    index: int
    """Index of its prompt."""

    number: int
    """Number of its environment, unique within the run."""

    prompt: Prompt
    key: int
    episode: EpisodeResponse = field(default_factory=EpisodeResponse)
    limit: int = 0
    """Maximum tokens in the whole sequence, including the opening."""


def play(
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
    """Play an episode for each prompt, in order, within the limits of the settings.

    Args:
        model: a causal language model, plain or with adapters.
        chat: the model's chat format.
        environments: the environments' workers.
        prompts: the rows with which environments are reset.
        config: settings of the step.
        temperature: sampling temperature; 0 is greedy.
        seed: seed of sampling and of the environments.
        keys: each episode's key for sampling.
        group_size: episodes per group, whose environments have equal seeds.
        on_response: called with (prompt index, episode) as each episode ends.

    Raises:
        RewardError: the supervisor of the environments has exited.
        ConfigError: there is no room for the keys and values of one sequence.
    """
    sampler = Sampler(temperature=temperature, top_p=1.0, seed=seed, stop_ids=tuple(chat.stop_ids))
    free = free_bytes(next(model.parameters()).device)
    room = pages_within(base_model(model), free, num_tokens=config.max_length)
    slots = max(1, min(config.generation_batch_size, len(prompts)))
    if not takes_slots(base_model(model)):
        slots = min(slots, (room - 1) // num_pages(config.max_length))
    batch = OpenBatch(
        model,
        num_slots=slots,
        capacity=config.max_length,
        num_pages=min(room, 1 + slots * num_pages(config.max_length)),
        reuses=True,  # a turn reads only what came after the last one
    )
    table = _Table(batch, chat, environments, sampler, config)
    for index, (prompt, key) in enumerate(zip(prompts, keys, strict=True)):
        table.begin(index, prompt, key=key, seed=episode_seed(seed, key // group_size))
    done: dict[int, EpisodeResponse] = {}
    while table.busy:
        for index, episode in table.advance():
            done[index] = episode
            if on_response is not None:
                on_response(index, episode)
    return [done[index] for index in range(len(prompts))]


class _Table:
    """Running episodes, each waiting for the actor or the environment to move next."""

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
        self._generating: dict[Ticket, _Playing] = {}
        self._thinking: deque[tuple[int, _Playing]] = deque()
        """Episodes waiting for their environment, and the step at which they are resumed."""
        self._finishing: dict[int, _Playing] = {}
        """Episodes waiting for their reward, by the number of their environment."""
        self._replies: dict[int, CallResult] = {}
        self._steps = 0

    @property
    def busy(self) -> bool:
        """Whether any episode has not ended."""
        return bool(self._generating or self._thinking or self._finishing)

    def begin(self, index: int, prompt: Prompt, *, key: int, seed: int) -> None:
        """Begin an episode by resetting its environment."""
        row = {**prompt.extra, "dialogue": [each.turn for each in prompt.messages]}
        number = self._environments.begin(row, seed=seed)
        self._thinking.append((self._steps, _Playing(index, number, prompt, key)))

    def advance(self) -> list[tuple[int, EpisodeResponse]]:
        """Process the environments' replies and one step of the batch; return the ended episodes.

        Which sequences share a pass depends only on the number of steps, not on the clock: if an
        environment has not replied when it is due, the batch waits for it.
        """
        done = [*self._take_moves(), *self._take_rewards()]
        if self._batch.busy:
            self._steps += 1
            for event in self._batch.step():
                if isinstance(event, Ended):
                    if event.error is not None:
                        raise event.error
                    done += self._end_turn(self._generating.pop(event.ticket), event.ticket)
        return [(playing.index, playing.episode) for playing in done]

    def _take_moves(self) -> list[_Playing]:
        """Resume the episodes whose environments are due; return the ended ones."""
        done: list[_Playing] = []
        while self._thinking:
            due, playing = self._thinking[0]
            if not self._batch.busy:
                self._steps = max(self._steps, due)  # no other episode is running
            if due > self._steps:
                break
            self._thinking.popleft()
            done += self._take(playing, self._reply_to(playing.number))
        return done

    def _take_rewards(self) -> list[_Playing]:
        """Return the episodes whose rewards have arrived; wait for one if nothing else can run."""
        if not self._finishing:
            return []
        self._receive()
        if not (self._batch.busy or self._thinking):
            number = next(iter(self._finishing))
            self._replies[number] = self._reply_to(number)
        rewarded = sorted(self._finishing.keys() & self._replies.keys())
        return [
            ended
            for number in rewarded
            for ended in self._take(self._finishing.pop(number), self._replies.pop(number))
        ]

    def _receive(self, *, wait: bool = False) -> None:
        self._replies |= {each.episode: each for each in self._environments.receive(wait=wait)}

    def _reply_to(self, number: int) -> CallResult:
        """Return the result of an environment's move once it has arrived."""
        while number not in self._replies:
            self._receive(wait=True)
        return self._replies.pop(number)

    def _take(self, playing: _Playing, played: CallResult) -> list[_Playing]:
        """Continue with the result of a move; return the episode if it has ended."""
        episode = playing.episode
        if played.reward is not None:
            episode.verdict = played.reward
            if played.reward.outcome.failure is not None:
                _fail(episode, played.reward.outcome.failure)
            return [playing]
        if not episode.sequence.input_ids:
            self._open(playing, played)
        elif played.failure is not None:
            _fail(episode, played.failure)
            return [playing]
        elif played.messages is None:
            episode.stopped = True
            self._finish(playing, "environment")
        else:
            return self._observe(playing, played.messages)
        return []

    def _open(self, playing: _Playing, played: CallResult) -> None:
        """Submit the first turn; if the episode can't start, respond to the row's prompt instead.

        This way, a rollout always has the full number of responses, all from the policy.
        """
        episode, failure = playing.episode, played.failure
        opening = played.messages or ()
        ids: list[int] = []
        try:
            ids = self._chat.encode_prompt(opening) if opening else []
        except DataError as error:
            failure = f"the result of reset can't be rendered in the chat format: {error}"
            self._environments.request_reward(playing.number)
        if len(ids) > self._config.max_prompt_length:
            failure = (
                f"reset returned {len(ids)} tokens, more than ppo.max_prompt_length"
                f" {self._config.max_prompt_length}"
            )
            self._environments.request_reward(playing.number)
        if failure is not None:
            opening, ids = playing.prompt.messages, playing.prompt.input_ids
            _fail(episode, failure)
        episode.opening = tuple(opening)
        episode.sequence = Encoded.untrained(list(ids))
        playing.limit = min(len(ids) + self._config.max_new_tokens, self._batch.capacity)
        self._submit(playing)

    def _observe(self, playing: _Playing, observation: tuple[Message, ...]) -> list[_Playing]:
        """Append an observation and submit the next turn, or end the episode at its limit.

        Return the episode if it failed because the chat format can't render the observation.
        """
        episode = playing.episode
        if episode.num_turns == self._config.max_turns:
            self._finish(playing, "turns")
            return []
        try:
            ids = self._chat.encode_observation((*episode.opening, *episode.turns), observation)
        except DataError as error:
            _fail(episode, f"the result of step can't be rendered in the chat format: {error}")
            self._environments.request_reward(playing.number)
            return [playing]
        if len(episode.sequence) + len(ids) >= playing.limit:
            self._finish(playing, "tokens")
            return []
        episode.turns += observation
        _append(episode.sequence, ids, trained=False)
        self._submit(playing)
        return []

    def _submit(self, playing: _Playing) -> None:
        sequence = playing.episode.sequence
        request = Request(
            tuple(sequence.input_ids),
            self._sampler,
            playing.key,
            playing.limit - len(sequence),
            drawn=len(playing.episode.ids),
        )
        self._generating[self._batch.submit(request)] = playing

    def _end_turn(self, playing: _Playing, ticket: Ticket) -> list[_Playing]:
        """Request the next move or the reward; return the episode if it had already failed."""
        episode, response = playing.episode, ticket.response
        _append(episode.sequence, response.ids, trained=True)
        episode.ids += response.ids
        episode.logprobs += response.logprobs
        text = decode_response(self._chat.tokenizer, response.text_ids)
        episode.turns += (Message("assistant", text),)
        if episode.end == "failed":
            return [playing]
        if response.stopped:
            self._environments.step(playing.number, text)
            self._thinking.append((self._steps + THINKING_STEPS, playing))
        else:
            self._finish(playing, "tokens")
        return []

    def _finish(self, playing: _Playing, end: End) -> None:
        """Record how the episode ended, and request its reward."""
        playing.episode.end = end
        self._environments.request_reward(playing.number)
        self._finishing[playing.number] = playing


def _fail(episode: EpisodeResponse, sentence: str) -> None:
    episode.end, episode.stopped = "failed", False
    episode.verdict = EnvironmentReward(Outcome.failed(sentence))


def _append(sequence: Encoded, ids: Sequence[int], *, trained: bool) -> None:
    sequence.input_ids.extend(ids)
    sequence.trained.extend([trained] * len(ids))


def transcript(turns: Sequence[Message]) -> str:
    """Responses and observations as text; other turns follow the name of their role."""
    return "\n".join(
        each.content if each.role == "assistant" else f"[{each.role}] {each.content}"
        for each in turns
    )


def play_shared(
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
    """`play` on one process, or as a collective of processes with the same prompts.

    With several processes `on_response` is called once all episodes have ended.
    """
    same_rows = current_mesh().model_parallel.untracked
    starts = range(0, len(prompts), group_size)
    groups = same_rows.shard([range(at, min(at + group_size, len(prompts))) for at in starts])
    own = [place for group in groups for place in group]
    played = play(
        model,
        chat,
        environments,
        [prompts[place] for place in own],
        config,
        keys=[keys[place] for place in own],
        group_size=group_size,
        on_response=on_response if same_rows.size == 1 else None,
        **settings,
    )
    if same_rows.size == 1:
        return played
    done: dict[int, EpisodeResponse] = {}
    for theirs in same_rows.gather_objects(dict(zip(own, played, strict=True))):
        done |= theirs
    episodes = [done[place] for place in range(len(prompts))]
    for place, episode in enumerate(episodes):
        if on_response is not None:
            on_response(place, episode)
    return episodes
