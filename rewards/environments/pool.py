"""Worker processes that run environments: one object of the user's class per episode.

All calls of an episode run in the same worker. A worker that replaces a dead one replays its
episodes up to the current call.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from pipeline.data.examples import Message, Role
from pipeline.system.errors import UserError
from rewards.contract import Outcome, describe_value, parse_outcome
from rewards.environments.file import METHODS, EnvironmentFile
from rewards.environments.tools import ToolEnvironment, find_tools
from rewards.workers import WorkerGroup, Workers


@dataclass(frozen=True)
class EnvironmentReward:
    """Result of an environment's `reward`."""

    outcome: Outcome
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named components of the reward; the outcome is their sum."""


@dataclass(frozen=True)
class CallResult:
    """Result of a method call."""

    episode: int

    messages: tuple[Message, ...] | None = None
    """The return value of reset or step; None if the episode has ended."""

    failure: str | None = None
    """Error message if the environment failed, which ends its episode."""

    reward: EnvironmentReward | None = None
    """The return value of reward."""


@dataclass(frozen=True)
class _EnvironmentCall:
    """A method call, and the data for replaying the episode up to it."""

    episode: int
    method: Literal["reset", "step", "reward"]
    row: Mapping[str, Any]
    seed: int
    responses: tuple[str, ...] = ()
    """Responses of the episode so far; for `step`, including the newest."""


class EnvironmentPool:
    """Worker processes that hold an environment for each episode.

    An episode has at most one pending call; `receive` returns its result.

    Args:
        file: the user's class.
        workers: number of worker processes.
        timeout_seconds: maximum time of a method call.

    Raises:
        ConfigError: the class can't be loaded.
    """

    def __init__(self, file: EnvironmentFile, *, workers: int, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._num_episodes = 0
        self._last_calls: dict[int, _EnvironmentCall] = {}
        """Last call of each episode."""
        self._worker_episodes: list[set[int]] = [set() for _ in range(workers)]
        """Episodes of each worker."""
        self._pending: dict[int, int] = {}
        """Episode of each pending call, by call id."""
        name = f"ppo.environment {file.name} of {file.file}"
        self._workers = Workers([WorkerGroup(name, partial(_EnvironmentWorker, file))] * workers)

    def begin(self, row: Mapping[str, Any], *, seed: int) -> int:
        """Reset an environment for a new episode; return the episode's number."""
        self._num_episodes += 1
        min(self._worker_episodes, key=len).add(self._num_episodes)
        self._submit(_EnvironmentCall(self._num_episodes, "reset", row, seed))
        return self._num_episodes

    def step(self, episode: int, response: str) -> None:
        """Pass a response to an episode's environment."""
        last = self._last_calls[episode]
        self._submit(
            _EnvironmentCall(episode, "step", last.row, last.seed, (*last.responses, response))
        )

    def request_reward(self, episode: int) -> None:
        """Request an episode's reward; this must be the episode's last call."""
        last = self._last_calls[episode]
        self._submit(_EnvironmentCall(episode, "reward", last.row, last.seed, last.responses))

    def _submit(self, call: _EnvironmentCall) -> None:
        self._last_calls[call.episode] = call
        group = next(
            n for n, episodes in enumerate(self._worker_episodes) if call.episode in episodes
        )
        call_id = self._workers.submit(
            call, group=group, seconds=self._timeout_seconds, name=call.method
        )
        self._pending[call_id] = call.episode

    def receive(self, *, wait: bool) -> list[CallResult]:
        """Return the results received since the last call; with `wait`, block until there is one.

        Raises:
            RewardError: the workers' supervisor has exited.
        """
        results: list[CallResult] = []
        for reply in self._workers.receive(wait=wait):
            episode = self._pending.pop(reply.call_id)
            reward, messages = None, reply.value
            if isinstance(reply.value, EnvironmentReward):
                reward, messages = reply.value, None
            results.append(CallResult(episode, messages, reply.failure, reward))
            if reply.failure is not None or reward is not None:
                del self._last_calls[episode]
                for episodes in self._worker_episodes:
                    episodes.discard(episode)
        return results

    def close(self) -> None:
        """Stop all processes."""
        self._workers.close()


class InvalidReturnError(UserError):
    """A method returned a value of the wrong type."""


class _EnvironmentWorker:
    """Handles the calls of one worker, and holds its environments by episode."""

    def __init__(self, file: EnvironmentFile) -> None:
        self._class: Any = file.load()
        self._takes_turns = callable(getattr(self._class, "step", None))
        for method in METHODS if self._takes_turns else ("reset",):
            getattr(self._class, method)  # raises if no base class has it
        if not self._takes_turns:
            find_tools(self._class)
        self._environments: dict[int, Any] = {}

    def __call__(
        self, call: _EnvironmentCall, restart_deadline: Callable[[], None]
    ) -> tuple[Message, ...] | EnvironmentReward | None:
        """Run a call; if its episode isn't here, first replay it, with a full deadline per step."""
        try:
            if call.method == "reset":
                return parse_messages("reset", self._reset(call))
            if call.episode not in self._environments:
                self._reset(call)
                for response in call.responses[:-1] if call.method == "step" else call.responses:
                    restart_deadline()
                    self._environments[call.episode].step(response)
                restart_deadline()
            if call.method == "reward":
                return parse_reward(self._environments.pop(call.episode).reward())
            returned = self._environments[call.episode].step(call.responses[-1])
            return None if returned is None else parse_messages("step", returned)
        except BaseException:
            self._environments.pop(call.episode, None)
            raise

    def _reset(self, call: _EnvironmentCall) -> object:
        instance = self._class()
        environment = instance if self._takes_turns else ToolEnvironment(instance)
        self._environments[call.episode] = environment
        return environment.reset(call.row, seed=call.seed)


ROLES: Mapping[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}
"""Role names as plain strings, to replace instances of subclasses of str."""


def parse_messages(method: str, returned: object) -> tuple[Message, ...]:
    """Parse the return value of reset or step as messages.

    Raises:
        InvalidReturnError: the value is not a list of messages, or can't precede a response.
    """
    if isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Sequence):
        raise InvalidReturnError(
            f"{method} returned {describe_value(returned)}, not a list of messages"
        )
    messages = tuple(_parse_message(method, message) for message in returned)
    if not messages or messages[-1].role != "user":
        raise InvalidReturnError(f"{method} must return messages that end with a user message")
    if method == "step" and any(message.role == "assistant" for message in messages):
        raise InvalidReturnError("step returned an assistant message; only the model writes those")
    return messages


def _parse_message(method: str, value: Any) -> Message:  # noqa: ANN401
    get = value.get if isinstance(value, Mapping) else partial(getattr, value)
    role, content = get("role", None), get("content", None)
    if not isinstance(role, str) or role not in ROLES or not isinstance(content, str):
        raise InvalidReturnError(
            f"{method} returned {describe_value(value)} as a message; a message needs a role"
            " (system, user or assistant) and a string as content"
        )
    content = str.__str__(content)  # the file's subclasses of str exist only in this process
    try:
        content.encode()
    except UnicodeEncodeError:
        raise InvalidReturnError(
            f"{method} returned {describe_value(content)}, which is not Unicode text"
        ) from None
    return Message(ROLES[role], content)


def parse_reward(returned: object) -> EnvironmentReward:
    """Parse the return value of reward: a number, None, or named numbers, which are summed."""
    if not isinstance(returned, Mapping):
        return EnvironmentReward(parse_outcome(returned))
    outcomes = {str(name): parse_outcome(value) for name, value in returned.items()}
    for name, outcome in outcomes.items():
        if outcome.value is None:
            return EnvironmentReward(
                Outcome.failed(f"{name}: {outcome.failure or 'it returned None'}")
            )
    parts = {name: outcome.value for name, outcome in outcomes.items() if outcome.value is not None}
    return EnvironmentReward(Outcome(sum(parts.values())) if parts else Outcome(), parts)
