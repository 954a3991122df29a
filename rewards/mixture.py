"""The rewards of a run: several sources, weighted, scored by worker processes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pipeline.errors import ConfigError
from rewards.config import RewardConfig, check_limits
from rewards.contract import Episode, Outcome, RewardError, Scored, Verdicts
from rewards.link import Link
from rewards.messages import Collect, Collected, Opened, Setup, Submission
from rewards.sources import Source, read_sources


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


class Rewards:
    """Scores episodes in worker processes; a context that leaves no process behind.

    `submit` as responses end, and `results` once all are submitted.

    Args:
        sources: what the responses are rewarded for.
        gold: what is measured beside that and never trained on.
        timeout_seconds: the time of one call of a function or verifier, or of one request.
        workers: processes that compute.
        max_failures: share of the responses on which a source may fail before the run stops.
        cache_dir: where answers of endpoints are kept, so that no request is repeated.

    Raises:
        ConfigError: a source can't be used; raised before any worker starts, but for errors that a
            user's own code raises as it is loaded.
    """

    def __init__(
        self,
        sources: Sequence[RewardConfig],
        *,
        gold: RewardConfig | None = None,
        timeout_seconds: float = 10.0,
        workers: int = 2,
        max_failures: float = 0.1,
        cache_dir: Path | None = None,
    ) -> None:
        check_limits(timeout_seconds=timeout_seconds, workers=workers, max_failures=max_failures)
        configs = [*sources, *([] if gold is None else [gold])]
        self._sources = read_sources(configs, cache_dir=cache_dir, timeout_seconds=timeout_seconds)
        self._num_trained = len(sources)
        self._max_failures = max_failures
        self._slots: list[int] = []
        self._pool = Pool(self._sources, workers=workers)

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """SHA-256 of the files of the sources, by name: what binds a run."""
        return fingerprint_of(self._sources)

    @property
    def columns(self) -> frozenset[str]:
        """Columns that the sources read from `Episode.extra`; "*" where they may read any."""
        return columns_of(self._sources)

    @property
    def notes(self) -> list[str]:
        """Sentences for the log: as what each function was recognized."""
        return [source.note for source in self._sources if source.note is not None]

    def submit(self, episodes: Sequence[Episode]) -> None:
        """Begin to score the episodes; returns at once."""
        self._slots += [episode.slot for episode in episodes]
        self._pool.submit(episodes)

    def results(self) -> Verdicts:
        """Wait for the rewards of all episodes that were submitted since the last call."""
        collected = self._pool.collect()
        order = sorted(range(len(self._slots)), key=self._slots.__getitem__)
        slots = [self._slots[place] for place in order]
        self._slots = []
        scored = [_scored(outcomes, order) for outcomes in collected.outcomes]
        names = [source.name for source in self._sources]
        trained = scored[: self._num_trained]
        return Verdicts(
            slots=slots,
            sources=dict(zip(names, trained, strict=False)),
            gold=scored[-1] if len(scored) > len(trained) else None,
            seconds=dict(zip(names, collected.seconds, strict=True)),
        )

    def check_failures(
        self, failed: Mapping[str, int], *, num_rows: int, first: Mapping[str, str | None]
    ) -> None:
        """Stop a command whose rewards are missing, as the function of that name does."""
        check_failures(
            failed,
            num_rows=num_rows,
            first=first,
            max_failures=self._max_failures,
            setting="--max-failures",
        )

    def close(self) -> None:
        """End all worker processes."""
        self._pool.close()

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def check_failures(
    failed: Mapping[str, int],
    *,
    num_rows: int,
    first: Mapping[str, str | None],
    max_failures: float,
    setting: str = "max_reward_failures",
) -> None:
    """Stop a run whose rewards are missing.

    Args:
        failed: by source, the responses that it failed on, over all processes.
        num_rows: all responses of the batch.
        first: by source, the sentence of its first failure.
        max_failures: the share that may fail.
        setting: which says so, for the message.

    Raises:
        RewardError: a source failed on a larger share.
    """
    for name, count in failed.items():
        if count > max_failures * num_rows:
            raise RewardError(
                f"rewards.{name} failed on {count} of {num_rows} responses, more than"
                f" {setting} {max_failures:g} allows; the first failure:"
                f" {first.get(name) or 'not known'}"
            )


def fingerprint_of(sources: Sequence[Source]) -> dict[str, str]:
    """SHA-256 of the files of the sources, by name."""
    prints = {source.name: source.fingerprint for source in sources}
    return {name: value for name, value in prints.items() if value is not None}


def columns_of(sources: Sequence[Source]) -> frozenset[str]:
    """Columns that the sources read."""
    return frozenset[Any]().union(*(source.columns for source in sources))


def _scored(outcomes: Sequence[Outcome], order: Sequence[int]) -> Scored:
    ordered = [outcomes[place] for place in order]
    return Scored([each.value for each in ordered], [each.failure for each in ordered])
