"""The rewards of a run: several sources, weighted, beside one that is only measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from pipeline.errors import require
from rewards.combine import failed_rows, normalize_then_sum, weighted_sum, without_failures
from rewards.config import RewardConfig
from rewards.contract import Episode, Outcome, RewardError, Scored, Verdicts
from rewards.pool import Pool
from rewards.sources import Source, read_sources

Combine = Literal["sum", "normalize_then_sum"]


class Rewards:
    """Scores episodes in worker processes; a context that leaves no process behind.

    `submit` as responses end, and `results` once all are submitted.

    Args:
        sources: what the responses are rewarded for.
        gold: what is measured beside that and never trained on.
        combine: how the sources become one number.
        timeout_seconds: the time of one call of a function or verifier, or of one request.
        workers: processes that compute.
        max_failures: share of the responses on which a source may fail before the run stops.
        cache_dir: where answers of endpoints are kept, so that no request is repeated.

    Raises:
        ConfigError: a source can't be used; said before any worker starts, but for errors that a
            user's own code raises as it is loaded.
    """

    def __init__(
        self,
        sources: Sequence[RewardConfig],
        *,
        gold: RewardConfig | None = None,
        combine: Combine = "sum",
        timeout_seconds: float = 10.0,
        workers: int = 2,
        max_failures: float = 0.1,
        cache_dir: Path | None = None,
    ) -> None:
        require(
            timeout_seconds > 0, f"rewards: timeout_seconds must be above 0, got {timeout_seconds}"
        )
        require(workers >= 1, f"rewards: workers must be 1 or more, got {workers}")
        require(
            0 <= max_failures <= 1,
            f"rewards: max_failures must lie between 0 and 1, got {max_failures}",
        )
        configs = [*sources, *([] if gold is None else [gold])]
        self._sources = read_sources(configs, cache_dir=cache_dir, timeout_seconds=timeout_seconds)
        self._num_trained = len(sources)
        self._combine: Combine = combine
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
        summed = weighted_sum([each.values for each in trained], self._weights)
        return Verdicts(
            slots=slots,
            sources=dict(zip(names, trained, strict=False)),
            gold=scored[-1] if len(scored) > len(trained) else None,
            combined=without_failures(summed, trained, self._weights),
            masked=failed_rows(trained, self._weights, len(slots)),
            seconds=dict(zip(names, collected.seconds, strict=True)),
        )

    def combine(self, sources: Sequence[Scored], *, group_size: int) -> list[float | None]:
        """One number for each response of a whole batch, of all processes, by `combine`.

        `sum` gives rewards, the same as `Verdicts.combined`; `normalize_then_sum` gives advantages.
        Where a source with a weight failed, and where none applies, it is None; responses with a
        failure take no part in the normalization.
        """
        masked = failed_rows(sources, self._weights, len(sources[0].values))
        values = [
            [None if hidden else value for value, hidden in zip(each.values, masked, strict=True)]
            for each in sources
        ]
        if self._combine == "sum":
            return weighted_sum(values, self._weights)
        return normalize_then_sum(values, self._weights, group_size=group_size)

    def check_failures(
        self, failed: Mapping[str, int], *, num_rows: int, first: Mapping[str, str | None]
    ) -> None:
        """Stop a run whose rewards are missing, as the function of that name does."""
        check_failures(failed, num_rows=num_rows, first=first, max_failures=self._max_failures)

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

    @property
    def _weights(self) -> list[float]:
        return [source.config.weight for source in self._sources[: self._num_trained]]


def check_failures(
    failed: Mapping[str, int],
    *,
    num_rows: int,
    first: Mapping[str, str | None],
    max_failures: float,
) -> None:
    """Stop a run whose rewards are missing.

    Args:
        failed: by source, the responses that it failed on, over all processes.
        num_rows: all responses of the batch.
        first: by source, the sentence of its first failure.
        max_failures: the share that may fail.

    Raises:
        RewardError: a source failed on a larger share.
    """
    for name, count in failed.items():
        if count > max_failures * num_rows:
            raise RewardError(
                f"rewards.{name} failed on {count} of {num_rows} responses, more than"
                f" max_reward_failures {max_failures:g} allows; the first failure:"
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
