"""The training process's end of the reward workers."""

from collections.abc import Sequence

from pipeline.errors import ConfigError
from rewards.contract import Episode
from rewards.link import Link
from rewards.messages import Collect, Collected, Opened, Setup, Submission
from rewards.sources import Source


class Pool:
    """Worker processes that score while this process goes on.

    Raises:
        ConfigError: a source can't be loaded.
    """

    def __init__(self, sources: Sequence[Source], *, workers: int) -> None:
        self._link = Link()
        try:
            self._link.send(Setup(list(sources), workers))
            opened: Opened = self._link.receive()
        except BaseException:
            self.close()
            raise
        for name, text in opened.errors.items():
            self.close()
            raise ConfigError(f"rewards.{name} can't be loaded: {' '.join(text.split())}")

    def submit(self, episodes: Sequence[Episode]) -> None:
        """Have every source score the episodes; returns at once."""
        self._link.send(Submission(list(episodes)))

    def collect(self) -> Collected:
        """Wait for the outcomes of all that was submitted since the last call."""
        self._link.send(Collect())
        return self._link.receive()

    def close(self) -> None:
        """End all processes."""
        self._link.close()
