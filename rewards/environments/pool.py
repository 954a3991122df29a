"""Worker processes that run environments: one object of the user's class per episode.

Moves of an episode always go to the same worker. A worker that replaces a dead one replays its
episodes up to the current move.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from pipeline.data.examples import Message, Role
from pipeline.system.errors import UserError
from rewards.contract import Outcome, described, parse_outcome
from rewards.environments.file import VERBS, EnvironmentFile
from rewards.environments.tools import ToolEnvironment, find_tools
from rewards.workers import Lane, Workers


@dataclass(frozen=True)
class Verdict:
    """Result of an environment's `reward`."""

    outcome: Outcome
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward; the outcome is their sum."""


@dataclass(frozen=True)
class Played:
    """Result of a move."""

    episode: int

    messages: tuple[Message, ...] | None = None
    """The value of reset or step; None when the episode has ended."""

    failure: str | None = None
    """A message if the environment failed, which ends its episode."""

    verdict: Verdict | None = None
    """The value of reward."""


@dataclass(frozen=True)
class _Move:
    """The next method to call, and the data for replaying the episode up to it."""

    episode: int
    verb: Literal["reset", "step", "reward"]
    row: Mapping[str, Any]
    seed: int
    responses: tuple[str, ...] = ()
    """Responses of the episode so far; for `step`, including the newest."""


class Environments:
    """Worker processes that hold an environment for each episode.

    An episode has one pending move at a time, whose result `receive` returns.

    Args:
        file: the user's class.
        workers: number of worker processes.
        timeout_seconds: maximum time of a method call.

    Raises:
        ConfigError: the class can't be loaded.
    """

    def __init__(self, file: EnvironmentFile, *, workers: int, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._count = 0
        self._last: dict[int, _Move] = {}
        """Last move of each episode."""
        self._episodes: list[set[int]] = [set() for _ in range(workers)]
        """Episodes of each worker."""
        self._calls: dict[int, int] = {}
        """Episode of each pending call, by the call's number."""
        name = f"ppo.environment {file.name} of {file.file}"
        self._workers = Workers([Lane(name, partial(_Episodes, file))] * workers)

    def begin(self, row: Mapping[str, Any], *, seed: int) -> int:
        """Reset an environment for a new episode; return the episode's number."""
        self._count += 1
        min(self._episodes, key=len).add(self._count)
        self._submit(_Move(self._count, "reset", row, seed))
        return self._count

    def step(self, episode: int, response: str) -> None:
        """Pass a response to an episode's environment."""
        last = self._last[episode]
        self._submit(_Move(episode, "step", last.row, last.seed, (*last.responses, response)))

    def finish(self, episode: int) -> None:
        """Request an episode's reward, which is its last move."""
        last = self._last[episode]
        self._submit(_Move(episode, "reward", last.row, last.seed, last.responses))

    def _submit(self, move: _Move) -> None:
        self._last[move.episode] = move
        lane = next(n for n, episodes in enumerate(self._episodes) if move.episode in episodes)
        number = self._workers.submit(
            move, lane=lane, seconds=self._timeout_seconds, name=move.verb
        )
        self._calls[number] = move.episode

    def receive(self, *, wait: bool) -> list[Played]:
        """Results of moves since the last call; at least one with `wait`.

        Raises:
            RewardError: the workers' supervisor has exited.
        """
        results: list[Played] = []
        for reply in self._workers.receive(wait=wait):
            episode = self._calls.pop(reply.number)
            verdict, messages = None, reply.value
            if isinstance(reply.value, Verdict):
                verdict, messages = reply.value, None
            results.append(Played(episode, messages, reply.failure, verdict))
            if reply.failure is not None or verdict is not None:
                del self._last[episode]
                for episodes in self._episodes:
                    episodes.discard(episode)
        return results

    def close(self) -> None:
        """End all processes."""
        self._workers.close()


class WrongReturnError(UserError):
    """A method returned a value of the wrong type."""


class _Episodes:
    """The environments of a worker, by episode; called with each move."""

    def __init__(self, file: EnvironmentFile) -> None:
        self._class: Any = file.load()
        self._takes_turns = callable(getattr(self._class, "step", None))
        for verb in VERBS if self._takes_turns else ("reset",):
            getattr(self._class, verb)  # raises if no base class has it
        if not self._takes_turns:
            find_tools(self._class)
        self._playing: dict[int, Any] = {}

    def __call__(
        self, move: _Move, tick: Callable[[], None]
    ) -> tuple[Message, ...] | Verdict | None:
        """Play a move; an unknown episode is first replayed up to it, with full time per call."""
        try:
            if move.verb == "reset":
                return parse_messages("reset", self._begin(move))
            if move.episode not in self._playing:
                self._begin(move)
                for response in move.responses[:-1] if move.verb == "step" else move.responses:
                    tick()
                    self._playing[move.episode].step(response)
                tick()
            if move.verb == "reward":
                return verdict_of(self._playing.pop(move.episode).reward())
            returned = self._playing[move.episode].step(move.responses[-1])
            return None if returned is None else parse_messages("step", returned)
        except BaseException:
            self._playing.pop(move.episode, None)
            raise

    def _begin(self, move: _Move) -> object:
        user = self._class()
        environment = user if self._takes_turns else ToolEnvironment(user)
        self._playing[move.episode] = environment
        return environment.reset(move.row, seed=move.seed)


ROLES: Mapping[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}
"""Plain strings, which the file's subclasses of str may equal."""


def parse_messages(verb: str, returned: object) -> tuple[Message, ...]:
    """Parse the return value of reset or step as messages.

    Raises:
        WrongReturnError: the value is not a list of messages, or can't precede a response.
    """
    if isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Sequence):
        raise WrongReturnError(f"{verb} returned {described(returned)}, not a list of messages")
    messages = tuple(_message(verb, message) for message in returned)
    if not messages or messages[-1].role != "user":
        raise WrongReturnError(f"{verb} did not return a user message at the end")
    if verb == "step" and any(message.role == "assistant" for message in messages):
        raise WrongReturnError("step returned an assistant message, which only the model writes")
    return messages


def _message(verb: str, given: Any) -> Message:  # noqa: ANN401
    read = given.get if isinstance(given, Mapping) else partial(getattr, given)
    role, content = read("role", None), read("content", None)
    if not isinstance(role, str) or role not in ROLES or not isinstance(content, str):
        raise WrongReturnError(
            f"{verb} returned {described(given)} as a message; a message needs a role (system, user"
            " or assistant) and a string as content"
        )
    content = str.__str__(content)  # the file's subclasses of str exist only in this process
    try:
        content.encode()
    except UnicodeEncodeError:
        raise WrongReturnError(
            f"{verb} returned {described(content)}, which is not Unicode text"
        ) from None
    return Message(ROLES[role], content)


def verdict_of(returned: object) -> Verdict:
    """Parse the return value of reward: a number, None, or named numbers, which are summed."""
    if not isinstance(returned, Mapping):
        return Verdict(parse_outcome(returned))
    outcomes = {str(name): parse_outcome(value) for name, value in returned.items()}
    for name, outcome in outcomes.items():
        if outcome.value is None:
            return Verdict(Outcome.failed(f"{name}: {outcome.failure or 'it returned None'}"))
    parts = {name: o.value for name, o in outcomes.items() if o.value is not None}
    return Verdict(Outcome(sum(parts.values())) if parts else Outcome(), parts)
