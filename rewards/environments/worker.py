"""A worker process: plays the environments of its episodes, one call after another.

Started by `rewards.environments.players` as `python -m rewards.environments.worker FD PARENT`.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from pipeline.data.examples import Message, Role
from rewards.contract import Outcome, outcome_of
from rewards.environments.contract import VERBS, Environment, Verdict
from rewards.environments.file import EnvironmentFile
from rewards.environments.messages import Loaded, Play, Played
from rewards.environments.tools import ToolEnvironment
from rewards.functions import load_name
from rewards.processes import end_with_parent, leave_signals_to


def main(argv: Sequence[str]) -> None:
    """Load the class that comes first, then answer calls until the connection ends."""
    descriptor, parent = map(int, argv)
    end_with_parent(parent)
    leave_signals_to(parent)
    os.dup2(2, 1)  # what an environment prints is not an output of the command that runs it
    connection = Connection(descriptor)
    try:
        file: EnvironmentFile = connection.recv()
        try:
            kind = load_class(file)
        except Exception as error:  # noqa: BLE001 - whatever a user's file raises
            connection.send(Loaded(f"{type(error).__name__}: {error}"))
            return
        connection.send(Loaded())
        episodes = Episodes(kind, file)
        while True:
            connection.send(episodes.play(connection.recv()))
    except EOFError:
        return


def load_class(file: EnvironmentFile) -> Any:  # noqa: ANN401
    """The class, from the text that was read when the run began.

    Raises:
        TypeError: it lacks a method.
        Exception: whatever the file's own code raises.
    """
    kind = load_name(file.file, file.text, file.name)
    verbs = VERBS if takes_turns(kind, file) else ("reset",)
    missing = [verb for verb in verbs if not callable(getattr(kind, verb, None))]
    if missing:
        raise TypeError(f"class {file.name} lacks {' and '.join(missing)}")
    return kind


def takes_turns(kind: Any, file: EnvironmentFile) -> bool:  # noqa: ANN401
    """Whether a class has the three verbs and is not a set of tools; an imported base decides."""
    return callable(getattr(kind, "step", None)) if file.form is None else file.form == "turns"


class Episodes:
    """The environments of the episodes that a worker plays."""

    def __init__(self, kind: Any, file: EnvironmentFile) -> None:  # noqa: ANN401
        self._kind = kind
        self._file = file
        self._playing: dict[int, Environment] = {}

    def play(self, play: Play) -> Played:
        """Make a move; an episode that is not known is played up to it first."""
        try:
            return self._play(play)
        except WrongReturnError as error:
            sentence = str(error)
        except Exception as error:  # noqa: BLE001 - whatever a user's code raises
            sentence = f"{play.verb} raised {type(error).__name__}: {error}"
        self._playing.pop(play.episode, None)
        return Played(play.episode, failure=shortened(sentence))

    def _play(self, play: Play) -> Played:
        number = play.episode
        if play.verb == "reset":
            return Played(number, messages_of("reset", self._begin(play)))
        if number not in self._playing:
            self._begin(play)
            earlier = play.answers[:-1] if play.verb == "step" else play.answers
            for answer in earlier:
                self._playing[number].step(answer)
        if play.verb == "reward":
            return Played(number, verdict=verdict_of(self._playing.pop(number).reward()))
        returned = self._playing[number].step(play.answers[-1])
        return Played(number, None if returned is None else messages_of("step", returned))

    def _begin(self, play: Play) -> object:
        user = self._kind()
        environment = user if takes_turns(self._kind, self._file) else ToolEnvironment(user)
        self._playing[play.episode] = environment
        return environment.reset(play.row, seed=play.seed)


ROLES: Mapping[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}
"""Each as a plain text, which the file's own subclass of str may be equal to."""


class WrongReturnError(TypeError):
    """A method returned something else than it should."""


def messages_of(verb: str, returned: object) -> tuple[Message, ...]:
    """What reset or step returned, as messages.

    Raises:
        WrongReturnError: it is not a list of messages, or one that can't come before an answer.
    """
    if isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Sequence):
        raise WrongReturnError(f"{verb} returned {shown(returned)}, not a list of messages")
    messages = tuple(_message(verb, each) for each in returned)
    if not messages or messages[-1].role != "user":
        raise WrongReturnError(f"{verb} returned no message of the user at the end")
    if verb == "step" and any(each.role == "assistant" for each in messages):
        raise WrongReturnError("step returned a message of the assistant, which the model writes")
    return messages


def _message(verb: str, given: Any) -> Message:  # noqa: ANN401
    role, content = (
        (given.get("role"), given.get("content"))
        if isinstance(given, Mapping)
        else (getattr(given, "role", None), getattr(given, "content", None))
    )
    if not isinstance(role, str) or role not in ROLES or not isinstance(content, str):
        raise WrongReturnError(
            f"{verb} returned {shown(given)} as a message, which needs a role (system, user or"
            " assistant) and a text as content"
        )
    # A plain text: the file's own subclasses of str are known in this process alone.
    content = str.__str__(content)
    try:
        content.encode()
    except UnicodeEncodeError:
        raise WrongReturnError(
            f"{verb} returned {shown(content)}, which is not Unicode text"
        ) from None
    return Message(ROLES[role], content)


def verdict_of(returned: object) -> Verdict:
    """What reward returned: a number, None, or numbers by name, whose sum counts."""
    if not isinstance(returned, Mapping):
        return Verdict(outcome_of(returned))
    outcomes = {str(name): outcome_of(value) for name, value in returned.items()}
    for name, outcome in outcomes.items():
        if outcome.value is None:
            why = outcome.failure or "it gave None"
            return Verdict(Outcome.failed(f"{name}: {why}"))
    parts = {name: each.value for name, each in outcomes.items() if each.value is not None}
    return Verdict(Outcome(sum(parts.values())) if parts else Outcome(), parts)


def shown(value: object) -> str:
    """A value in a sentence."""
    return f"{type(value).__name__} {shortened(repr(value), 80)}"


def shortened(text: str, length: int = 500) -> str:
    """The text in one line of moderate length."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 3] + "..."


if __name__ == "__main__":
    main(sys.argv[1:])
