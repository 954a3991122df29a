"""The training process's end of the workers that play environments."""

import threading
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any

from pipeline.errors import ConfigError
from rewards.environments.file import EnvironmentFile
from rewards.environments.messages import Loaded, Move, Played, Stage
from rewards.link import Link

POLL_SECONDS = 0.2
"""After which the reader looks whether it is still needed."""


class Environments:
    """Worker processes that hold an environment for each episode.

    An episode has one move under way at a time; what comes of it is `receive`d.

    Args:
        file: the user's class.
        workers: processes that play.
        timeout_seconds: the time of one call of a method, after which its episode has failed.

    Raises:
        ConfigError: the class can't be loaded.
    """

    def __init__(self, file: EnvironmentFile, *, workers: int, timeout_seconds: float) -> None:
        self._count = 0
        self._received: SimpleQueue[Played | Exception] = SimpleQueue()
        self._closing = threading.Event()
        # Both ends may have much to send together: one of them always reads.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._link = Link()
        try:
            self._link.send(Stage(file, workers, timeout_seconds))
            loaded: Loaded = self._link.receive()
        except BaseException:
            self.close()
            raise
        if loaded.error is not None:
            self.close()
            raise ConfigError(
                f"ppo.environment: {file.name} of {file.file} can't be loaded:"
                f" {' '.join(loaded.error.split())}"
            )
        self._reader.start()

    def begin(self, row: Mapping[str, Any], *, seed: int) -> int:
        """Reset an environment for a new episode; returns its number."""
        self._count += 1
        self._link.send(Move(self._count, "reset", row=row, seed=seed))
        return self._count

    def step(self, episode: int, answer: str) -> None:
        """Hand an answer to an episode's environment."""
        self._link.send(Move(episode, "step", answer=answer))

    def finish(self, episode: int) -> None:
        """Ask for an episode's reward, its last move."""
        self._link.send(Move(episode, "reward"))

    def receive(self, *, wait: bool) -> list[Played]:
        """What came of moves since the last call; with `wait` of one at least.

        Raises:
            RewardError: the process that keeps the workers has ended.
        """
        played: list[Played] = []
        while (wait and not played) or not self._received.empty():
            message = self._received.get()
            if isinstance(message, Exception):
                raise message
            played.append(message)
        return played

    def _read(self) -> None:
        while not self._closing.is_set():
            try:
                if self._link.has_message(POLL_SECONDS):
                    self._received.put(self._link.receive())
            except Exception as error:  # noqa: BLE001 - whoever waits for a reply must see it
                self._received.put(error)
                return

    def close(self) -> None:
        """End all processes."""
        self._closing.set()
        if self._reader.is_alive():
            self._reader.join()
        self._link.close()
