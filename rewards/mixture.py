"""The rewards of a run: several sources, run by worker processes, and their weighted sum."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

from pipeline.system.errors import ConfigError
from rewards.config import RewardConfig
from rewards.contract import Episode, Outcome, Scorer, SourceResults, fail_all
from rewards.sources import Source, make_scorer, read_sources
from rewards.workers import Handler, RestartDeadline, RewardError, WorkerGroup, Workers

GOLD = "gold"
"""Name of the source that is only measured, never trained on."""


class Rewards:
    """Scores episodes in worker processes; a context manager that stops them on exit.

    Call `submit` as responses are completed, and `results` once all are submitted.

    Args:
        sources: the reward sources.
        gold: a source that is only measured.
        timeout_seconds: time limit of a function or verifier call, or of a request.
        workers: number of worker processes.
        max_failures: fraction of the responses on which a source may fail before the run stops.

    Raises:
        ConfigError: a source can't be used; raised before any worker starts, except for errors in a
            user's code when it is loaded.
    """

    def __init__(
        self,
        sources: Sequence[RewardConfig],
        *,
        gold: RewardConfig | None = None,
        timeout_seconds: float = 10.0,
        workers: int = 2,
        max_failures: float = 0.1,
    ) -> None:
        configs = [*sources, *([] if gold is None else [gold])]
        self._sources = read_sources(configs, timeout_seconds=timeout_seconds)
        self._names = [*(source.name for source in sources), *([] if gold is None else [GOLD])]
        self._max_failures = max_failures
        self._slots: list[int] = []
        self._outcomes: list[list[Outcome]] = [[] for _ in self._sources]
        """Outcomes of each source, in order of submission."""
        self._calls: dict[int, tuple[int, range]] = {}
        """Source of each call and the indices of its outcomes, by call id."""
        self._source_groups, groups = _make_groups(self._sources, workers)
        self._workers = Workers(groups)

    @property
    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of the sources' files, by source name; they must not change during a run."""
        fingerprints = {source.name: source.fingerprint for source in self._sources}
        return {name: value for name, value in fingerprints.items() if value is not None}

    @property
    def notes(self) -> list[str]:
        """Notes for the log on how the reward functions are called."""
        return [source.note for source in self._sources if source.note is not None]

    def submit(self, episodes: Sequence[Episode]) -> None:
        """Start scoring the episodes; return immediately."""
        if not episodes:
            return
        start = len(self._slots)
        self._slots += [episode.slot for episode in episodes]
        for index, source in enumerate(self._sources):
            size = len(episodes) if source.is_batched else 1
            for first in range(0, len(episodes), size):
                call_id = self._workers.submit(
                    (index, episodes[first : first + size]),
                    group=self._source_groups[index],
                    seconds=source.call_timeout(size),
                )
                self._calls[call_id] = index, range(start + first, start + first + size)
            self._outcomes[index] += [Outcome()] * len(episodes)

    def results(self) -> dict[str, SourceResults]:
        """Wait for the rewards of all episodes submitted since the last call.

        Returns:
            The results of each source, ordered by slot; `gold` is the last source.
        """
        while self._calls:
            for reply in self._workers.receive(wait=True):
                source_index, indices = self._calls.pop(reply.call_id)
                failed = reply.failure is not None
                outcomes = fail_all(str(reply.failure), len(indices)) if failed else reply.value
                self._outcomes[source_index][indices.start : indices.stop] = outcomes
        order = sorted(range(len(self._slots)), key=self._slots.__getitem__)
        sorted_outcomes = [[outcomes[index] for index in order] for outcomes in self._outcomes]
        self._slots, self._outcomes = [], [[] for _ in self._sources]
        return {
            name: SourceResults([o.value for o in outcomes], [o.failure for o in outcomes])
            for name, outcomes in zip(self._names, sorted_outcomes, strict=True)
        }

    def checked_results(self) -> dict[str, SourceResults]:
        """Return `results()`, unless a source failed on too many responses.

        Raises:
            RewardError: a source failed on a larger fraction of the responses than `max_failures`.
        """
        results = self.results()
        check_failures(
            {name: result.num_failed for name, result in results.items()},
            num_rows=max((len(result.values) for result in results.values()), default=0),
            first_failures={name: result.first_failure for name, result in results.items()},
            max_failures=self._max_failures,
            setting="--max-failures",
        )
        return results

    def close(self) -> None:
        """Stop all worker processes."""
        self._workers.close()

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _make_groups(
    sources: Sequence[Source], workers: int
) -> tuple[dict[int, int], list[WorkerGroup]]:
    """Return the group index of each source, and the groups.

    Compute-bound sources share a group with all workers. Every other source has a group with one
    worker, so that computation never waits for a network.
    """
    local = {n: source for n, source in enumerate(sources) if not source.uses_network}
    groups = [local] if local else []
    groups += [{n: source} for n, source in enumerate(sources) if source.uses_network]
    worker_groups = [
        WorkerGroup(
            ", ".join(f"rewards.{source.name}" for source in group.values()),
            partial(_load_scorers, group),
            workers if group is local else 1,
        )
        for group in groups
    ]
    return {n: index for index, group in enumerate(groups) for n in group}, worker_groups


def _load_scorers(sources: Mapping[int, Source]) -> Handler:
    """Load the sources of a group, in a worker process."""
    scorers: dict[int, Scorer] = {}
    for index, source in sources.items():
        try:
            scorers[index] = make_scorer(source)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"rewards.{source.name} can't be loaded: {reason}") from error

    def score(request: tuple[int, Sequence[Episode]], _restart: RestartDeadline) -> list[Outcome]:
        index, episodes = request
        return scorers[index](episodes)

    return score


def check_failures(
    num_failed: Mapping[str, int],
    *,
    num_rows: int,
    first_failures: Mapping[str, str | None],
    max_failures: float,
    setting: str = "max_reward_failures",
) -> None:
    """Raise an error if a source failed on too many responses.

    Args:
        num_failed: number of responses on which each source failed, over all processes.
        num_rows: number of responses in the batch.
        first_failures: each source's first failure message.
        max_failures: fraction of the responses on which a source may fail.
        setting: the setting's name, for the message.

    Raises:
        RewardError: a source failed on a larger fraction.
    """
    for name, count in num_failed.items():
        if count > max_failures * num_rows:
            raise RewardError(
                f"rewards.{name} failed on {count} of {num_rows} responses, more than"
                f" {setting} {max_failures:g} allows; the first failure:"
                f" {first_failures.get(name) or 'unknown'}"
            )


Values = Sequence[float | None]


def weighted_sum(values: Sequence[Values], weights: Sequence[float]) -> list[float | None]:
    """Return the weighted sum of values for each response, over the sources that apply to it.

    If some sources return None, the other weights are scaled so that the absolute weights have the
    same total, and rewards of different rows remain comparable. The result is None if no source
    with a nonzero weight applies.

    Args:
        values: for each source, a number or None per response.
        weights: the sources' weights.
    """
    total_weight = math.fsum(abs(weight) for weight in weights)
    combined: list[float | None] = []
    for row in zip(*values, strict=True):
        present = [(w, r) for w, r in zip(weights, row, strict=True) if r is not None and w != 0]
        present_weight = math.fsum(abs(weight) for weight, _ in present)
        scale = total_weight / present_weight if present_weight else 0.0
        total = math.fsum(weight * value for weight, value in present)
        combined.append(scale * total if present else None)
    return combined


def mask_failures(sources: Sequence[SourceResults], weights: Sequence[float]) -> list[Values]:
    """Return each source's values, with None for responses on which a weighted source failed.

    Such a response gets no reward from any source, because a partial sum is not a reward.
    """
    weighted = [source for source, weight in zip(sources, weights, strict=True) if weight != 0]

    def has_failed(row: int) -> bool:
        return any(source.failures[row] is not None for source in weighted)

    return [
        [None if has_failed(row) else value for row, value in enumerate(source.values)]
        for source in sources
    ]
