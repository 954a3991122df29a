"""Programs that reward responses while other responses are still being generated."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TypeVar

from evaluation.held_out import Prompt
from inference.engine.requests import Response
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.models.hf.chat import decode_response
from pipeline.parallel.group import Group
from pipeline.parallel.mesh import current_mesh
from pipeline.plan.output import CHECKPOINTS
from pipeline.system.errors import ConfigError
from pipeline.system.logs import Clock
from rewards.contract import Episode, Outcome, SourceResults
from rewards.environments.pool import EnvironmentPool
from rewards.mixture import Rewards
from step3_ppo.config import PPOConfig
from step3_ppo.episodes import EpisodeResponse

logger = logging.getLogger(__name__)


T = TypeVar("T")


MIN_CHUNK_SIZE = 8
"""Minimum number of responses that are submitted to a program together."""


ENVIRONMENT_FILE = "ppo.environment"
"""Name of the environment's file in fingerprints; no source can have this name."""


class RewardSources:
    """The sources of `ppo.rewards` other than the reward model, and `ppo.gold`.

    This is a context manager that stops all its worker processes on exit.
    """

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.seconds = 0.0
        """Seconds spent waiting for results, until reset."""
        self.environments: EnvironmentPool | None = None
        """The workers of the environment, if there is one."""
        self._rewards: Rewards | None = None
        self._workers = ExitStack()
        self._fingerprint: dict[str, str] = {}
        self._outcomes: dict[int, Outcome] = {}
        """Outcomes of episodes since the last call of `results`, by index."""
        self._model_group = current_mesh().model_parallel.untracked
        """Processes with the same responses, of which only the first calls the programs."""

    @property
    def has_programs(self) -> bool:
        """Whether programs score the responses."""
        return bool(self.config.programs) or self.config.gold is not None

    @property
    def is_empty(self) -> bool:
        """Whether neither programs nor an environment score the responses."""
        return not self.has_programs and self.config.environment is None

    def submit(self, episodes: Sequence[Episode]) -> None:
        """Start scoring the episodes."""
        if self._rewards is not None:
            self._rewards.submit(episodes)

    def record_outcome(self, index: int, outcome: Outcome) -> None:
        """Store the environment's outcome for the response at this index of the batch."""
        self._outcomes[index] = outcome

    def results(self) -> dict[str, SourceResults]:
        """Return each source's rewards, by name, for the episodes since the last call, in order."""
        program_results = self._share_first(self._collect_programs())
        return {**self._collect_environment(), **program_results}

    def _collect_environment(self) -> dict[str, SourceResults]:
        source = self.config.environment_source
        if source is None:
            return {}
        outcomes = [self._outcomes[index] for index in sorted(self._outcomes)]
        self._outcomes = {}
        values = [outcome.value for outcome in outcomes]
        return {source.name: SourceResults(values, [outcome.failure for outcome in outcomes])}

    def _collect_programs(self) -> dict[str, SourceResults]:
        if self._rewards is None:
            return {}
        clock = Clock()
        results = self._rewards.results()
        clock.end("rewards")
        self.seconds += clock.seconds["rewards"]
        return results

    def _share_first(self, value: T) -> T:
        """Return the value of the first of the processes that hold the same responses."""
        return self._model_group.gather_objects(value)[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the fingerprint of the sources: the hashes of their files."""
        return {"files": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Require that the run resumes with the sources with which it started.

        Raises:
            ConfigError: a source's file has changed.
        """
        current = self.state_dict()["files"]
        for name, fingerprint in state["files"].items():
            if current.get(name) != fingerprint:
                raise ConfigError(
                    f"the file of {_describe(name)} has changed since the run started; restore it,"
                    f" or remove {self.config.output_dir / CHECKPOINTS} to start over"
                )

    def check_same_files(self, group: Group) -> None:
        """Check that all processes have the same files.

        Raises:
            ConfigError: a file was edited while the processes started, or machines have different
                files; raised on all processes.
        """
        first, *others = group.gather_objects(self._fingerprint)
        for name, fingerprint in first.items():
            if any(other.get(name) != fingerprint for other in others):
                raise ConfigError(
                    f"processes have read different versions of the file of {_describe(name)}; copy"
                    " the same file to all machines, and restart"
                )

    def __enter__(self) -> "RewardSources":
        """Start the worker processes.

        Raises:
            ConfigError: a source can't be used.
        """
        with ExitStack() as stack:  # stops started workers on an error
            self._start(stack)
            self._workers = stack.pop_all()
        return self

    def _start(self, stack: ExitStack) -> None:
        config = self.config
        if config.environment is not None:
            file = config.read_environment()
            self.environments = EnvironmentPool(
                file, workers=config.reward_workers, timeout_seconds=config.reward_timeout
            )
            stack.callback(self.environments.close)
            self._fingerprint[ENVIRONMENT_FILE] = file.sha256
        if self.has_programs and self._model_group.rank == 0:
            self._rewards = Rewards(
                config.programs,
                gold=config.gold,
                timeout_seconds=config.reward_timeout,
                workers=config.reward_workers,
                max_failures=config.max_reward_failures,
            )
            stack.callback(self._rewards.close)
            self._fingerprint |= self._rewards.fingerprint
            for note in self._rewards.notes:
                logger.info("%s", note)
        self._fingerprint = self._share_first(self._fingerprint)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._workers.close()


class ResponseSubmitter:
    """Submits the responses of a batch to the sources in chunks, while others are generated.

    A function receives all responses to a prompt together, in chunks that do not depend on the
    order in which responses end.
    """

    def __init__(self, sources: RewardSources, prompts: Sequence[Prompt], chat: ChatFormat) -> None:
        self._sources = sources
        self._prompts = prompts
        self._chat = chat
        self._pending: dict[int, Response] = {}

    def __call__(self, index: int, response: Response) -> None:
        """Submit the response to prompt number `index` of the batch."""
        if isinstance(response, EpisodeResponse):
            self._sources.record_outcome(index, response.reward.outcome)
        if not self._sources.has_programs:
            return
        self._pending[index] = response
        group_size = self._sources.config.group_size
        size = -(-MIN_CHUNK_SIZE // group_size) * group_size
        start = index - index % size
        chunk = range(start, min(start + size, len(self._prompts)))
        if all(index in self._pending for index in chunk):
            self._sources.submit([self._make_episode(index) for index in chunk])

    def _make_episode(self, index: int) -> Episode:
        response, prompt = self._pending.pop(index), self._prompts[index]
        if isinstance(response, EpisodeResponse):
            *turns, answer = response.turns
            return Episode(
                prompt=response.opening,
                response=answer.content,
                turns=tuple(turns),
                extra=prompt.extra,
                stopped=response.stopped,
                num_tokens=len(response.ids),
                slot=index,
            )
        return Episode(
            prompt=prompt.messages,
            response=decode_response(self._chat.tokenizer, response.text_ids),
            extra=prompt.extra,
            stopped=response.stopped,
            num_tokens=len(response.ids),
            slot=index,
        )


def _describe(name: str) -> str:
    return name if name == ENVIRONMENT_FILE else f"the reward {name}"
