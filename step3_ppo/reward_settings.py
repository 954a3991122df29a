"""Settings of step 3's reward sources."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeline.config import RowColumns
from pipeline.settings.fields import to_plain
from pipeline.system.errors import require
from rewards.config import KINDS, RewardConfig, read_specs

if TYPE_CHECKING:
    from rewards.environments.file import EnvironmentFile

MODEL_KIND = "model"
"""Kind of the source for the reward model, whose scores step 3 computes."""

ENVIRONMENT_KIND = "environment"
"""Kind, and default name, of the environment's reward as a source."""

RESERVED_NAMES = ("score", "failures")
"""Names reserved for other `reward_*` metrics."""


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """Reward sources, in addition to or instead of a reward model."""

    rewards: tuple[RewardConfig, ...] = ()
    """Sources whose weighted sum is maximized (reward_funcs), as a list in a settings file or as
    JSON; train.py has the short forms --reward-function FILE.py:NAME and --reward KIND. If empty,
    only the reward model is used; it can also be one of the sources."""

    gold: RewardConfig | None = None
    """A source that is only measured, never trained on; null measures none."""

    reward_timeout: float = 10.0
    """Time limit in seconds for each call of a source or environment; longer calls fail."""

    reward_workers: int = 2
    """Worker processes per training process for sources, and the same number for environments."""

    environment: str | None = None
    """Class that responds between the actor's turns and rewards episodes, as FILE.py:CLASS, or the
    built-in `calculator` (docs/environments.md)."""

    max_turns: int = 8
    """Maximum number of the actor's turns in an episode."""

    max_reward_failures: float = 0.1
    """Largest fraction of an iteration's responses on which a source may fail; beyond it, the run
    stops. Responses on which a source failed are not trained on."""

    @property
    def uses_reward_model(self) -> bool:
        """Whether a reward model scores the responses."""
        return not self.rewards or any(source.kind == MODEL_KIND for source in self.rewards)

    @property
    def programs(self) -> tuple[RewardConfig, ...]:
        """The sources other than the reward model and the environment."""
        other_kinds = (MODEL_KIND, ENVIRONMENT_KIND)
        return tuple(source for source in self.rewards if source.kind not in other_kinds)

    @property
    def max_rewards(self) -> dict[str, float]:
        """Maximum reward of each source with a positive weight, before weighting."""
        positive = (source for source in self.rewards if source.weight > 0)
        return {source.name: KINDS[source.kind].maximum for source in positive}

    @property
    def environment_source(self) -> RewardConfig | None:
        """The source that gives the environment's reward; None without an environment."""
        return next((source for source in self.rewards if source.kind == ENVIRONMENT_KIND), None)

    @property
    def reward_columns(self) -> RowColumns:
        """Columns of the rows that the sources read; an environment receives all columns.

        Raises:
            ConfigError: the file or name of a source or of the environment doesn't exist.
        """
        from rewards.sources import read_sources, row_columns

        columns = row_columns(read_sources([*self.programs, *([self.gold] if self.gold else [])]))
        if self.environment is None:
            return columns
        needed = columns.needed | self.read_environment().columns
        return replace(columns, needed=needed, all=True)

    def check_rewards(self) -> None:
        """Reject sources that contradict each other.

        Raises:
            ConfigError: the settings are contradictory; the message names one of them.
        """
        names = [source.name for source in self.rewards]
        for kind in (ENVIRONMENT_KIND, MODEL_KIND):
            matching = [source for source in self.rewards if source.kind == kind]
            require(
                len(matching) < 2, f"ppo.rewards has two sources of kind {kind}; keep one of them"
            )
            require(
                self.gold is None or self.gold.kind != kind,
                f"ppo.gold can't be of kind {kind}; to measure it, add it to ppo.rewards with"
                " weight 0",
            )
        source = self.environment_source
        require(
            source is None or self.environment is not None,
            "ppo.rewards has a source of kind environment, but ppo.environment is not set; set it,"
            " or remove the source",
        )
        require(
            source is None or names.count(source.name) == 1,
            "ppo.rewards: the environment's source has the same name as another source; rename one",
        )
        for name in names:
            require(
                name not in RESERVED_NAMES,
                f"rewards.{name}: the metric name reward_{name} is reserved; rename the source",
            )
        require(
            0 <= self.max_reward_failures <= 1,
            f"ppo.max_reward_failures must be in [0, 1], got {self.max_reward_failures}",
        )

    def read_environment(self) -> "EnvironmentFile":
        """Read the class of the environment from its file.

        Raises:
            ConfigError: the environment can't be used, or no source gives a reward.
        """
        from rewards.environments.file import read_environment

        assert self.environment is not None
        file = read_environment(self.environment)
        require(
            file.defines_reward or any(source.kind != ENVIRONMENT_KIND for source in self.rewards),
            f"ppo.environment: class {file.name} in {file.file} gives no reward; define get_reward,"
            " or reward its episodes with --reward-function or --reward",
        )
        return file


def add_environment_source(config: RewardSettings) -> tuple[RewardConfig, ...]:
    """Return the sources; a configured environment is added unless it is one of them.

    If it is added to other sources, its weight is 0, so that it is only measured.
    """
    if config.environment is None or config.environment_source is not None:
        return config.rewards
    weight = 0.0 if config.rewards else 1.0
    source = RewardConfig(name=ENVIRONMENT_KIND, kind=ENVIRONMENT_KIND, weight=weight)
    return (*config.rewards, source)


def read_reward_options(options: Iterable[tuple[str, Sequence[str]]]) -> list[dict[str, Any]]:
    """Convert the values of `--reward-function` and `--reward` to settings.

    Raises:
        ConfigError: a value is not a valid source.
    """
    specs: list[str] = []
    for name, values in options:
        require(bool(values), f"--{name.replace('_', '-')} needs at least one value")
        for value in values:
            require(
                name == "reward" or re.fullmatch(r".+\.py:\w+", value) is not None,
                f"--reward-function {value} must have the form FILE.py:NAME",
            )
        specs += values
    return to_plain(read_specs(specs))
