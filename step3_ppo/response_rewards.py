"""The reward of each response of a rollout: a reward model's score, programs, or a weighted sum.

Dimension name: B responses of this process.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pipeline.parallel.mesh import current_mesh
from rewards.combine import normalize_then_sum, weighted_sum, without_failures
from rewards.contract import Scored
from step3_ppo.config import PPOConfig
from step3_ppo.models import Models
from step3_ppo.reward_settings import ENVIRONMENT, MODEL
from step3_ppo.reward_sources import GOLD
from step3_ppo.scoring import counted_scores, reward_of
from step3_ppo.statistics import standard_error


@dataclass(frozen=True)
class ResponseRewards:
    """The rewards of this process's responses."""

    reward: Float[Tensor, " B"]
    """What is maximized; 0 where it is not known."""

    score: Float[Tensor, " B"]
    """What metrics report: of a reward model alone its score in its own unit (`counted_scores`),
    else the reward; NaN where it is not known."""

    sources: Mapping[str, Scored] = field(default_factory=dict)
    """The values of each source, and `gold`; empty with a reward model alone."""

    seconds: float = 0.0
    """Waited for the sources after everything else was done."""

    @property
    def known(self) -> Bool[Tensor, " B"]:
        """Whether a response has a reward; on the others a source failed, or none applied."""
        return ~self.score.isnan()

    def by_source(self) -> dict[str, list[float | None]]:
        """The values of each source, by the name of its metric."""
        return {metric_of(name): scored.values for name, scored in self.sources.items()}

    def metrics(self, *, group_size: int = 1) -> dict[str, float]:
        """Means by source, the share without a reward, and the wait; over all processes.

        `group_size` responses to each prompt are not independent, which the standard error of gold
        takes into account.
        """
        if not self.sources:
            return {}
        sums: dict[str, float] = {"rows": float(len(self.score)), "unknown": 0.0}
        sums["unknown"] = float((~self.known).sum().item())
        for name, values in self.by_source().items():
            present = [value for value in values if value is not None]
            sums[name] = sum(present)
            sums[f"{name} count"] = float(len(present))
        totals = dict(zip(sums, current_mesh().data.sums(list(sums.values())), strict=True))
        means = {
            name: totals[name] / totals[f"{name} count"]
            for name in self.by_source()
            if totals[f"{name} count"]
        }
        if GOLD in self.sources:
            gold = _tensor(self.sources[GOLD].values, self.score)
            means |= {f"{GOLD}_stderr": standard_error(gold, group_size=group_size)}
        return {
            **means,
            "reward_failures": totals["unknown"] / totals["rows"],
            "seconds_rewards": self.seconds,
        }


def metric_of(source: str) -> str:
    """The name of a source's metric."""
    return source if source == GOLD else f"reward_{source}"


def rewards_of(
    models: Models,
    score: Float[Tensor, " B"] | None,
    stopped: Bool[Tensor, " B"],
    config: PPOConfig,
    *,
    given: Mapping[str, Scored] | None = None,
    learns: bool = True,
    strict: bool = True,
) -> ResponseRewards:
    """The rewards of the responses that were submitted to the sources since the last call.

    Args:
        models: the reward model, where there is one, and the sources.
        score: the reward model's raw score of each response.
        stopped: whether each ended by itself.
        config: settings of the step.
        given: the sources' values, if they have been collected already.
        learns: True for a rollout; the sources of answers to held-out prompts are summed,
            regardless of `reward_combine`.
        strict: whether failures may stop the run.

    Raises:
        RewardError: a source failed on a larger share of all processes' responses than
            `max_reward_failures`.
    """
    of_model = None if score is None else reward_of(score, stopped, models, config)
    given = models.sources.results() if given is None else given
    if strict:
        check_failures(given, models, num_rows=len(stopped))
    if not config.rewards:
        assert of_model is not None
        counted = counted_scores(score, stopped, models, config)
        return ResponseRewards(of_model, counted, given, models.sources.seconds)
    sources: dict[str, Scored] = {}
    for source in config.rewards:
        if source.kind == MODEL:
            assert of_model is not None
            sources[source.name] = Scored(of_model.tolist(), [None] * len(stopped))
        else:
            sources[source.name] = given[source.name]
    own = [sources[source.name] for source in config.rewards]
    # An environment counts even at weight 0: where it failed the episode is incomplete.
    counting = [1.0 if each.kind == ENVIRONMENT else each.weight for each in config.rewards]
    values = without_failures(own, counting)
    score = _tensor(weighted_sum(values, _weights(config)), stopped)
    reward = score
    if learns and config.reward_combine == "normalize_then_sum":
        reward = _tensor(normalized(values, config), stopped)
    gold = {GOLD: given[GOLD]} if GOLD in given else {}
    return ResponseRewards(
        reward.nan_to_num(nan=0.0), score, {**sources, **gold}, models.sources.seconds
    )


def normalized(values: Sequence[Sequence[float | None]], config: PPOConfig) -> list[float | None]:
    """The sum of sources, each normalized over the whole rollout (`normalize_then_sum`)."""
    data = current_mesh().data
    everyones = data.gather_objects(values)
    joined = [
        [value for values in everyones for value in values[place]] for place in range(len(values))
    ]
    combined = normalize_then_sum(joined, _weights(config), group_size=config.group_size)
    before = sum(len(values[0]) for values in everyones[: data.rank])
    return combined[before : before + len(values[0])]


def _weights(config: PPOConfig) -> list[float]:
    return [source.weight for source in config.rewards]


def _tensor(values: Sequence[float | None], like: Tensor) -> Float[Tensor, " B"]:
    known = [math.nan if value is None else value for value in values]
    return torch.tensor(known, dtype=torch.float32, device=like.device)


def check_failures(given: Mapping[str, Scored], models: Models, *, num_rows: int) -> None:
    """Stop all processes together if a source that is trained on failed too often."""
    if not given:
        return
    own = {
        name: (scored.num_failed, scored.first_failure)
        for name, scored in given.items()
        if name != GOLD
    }
    everyones: Sequence[tuple[int, dict[str, tuple[int, str | None]]]]
    everyones = current_mesh().data.gather_objects((num_rows, own))
    models.sources.check_failures(
        {name: sum(each[name][0] for _, each in everyones) for name in own},
        num_rows=sum(rows for rows, _ in everyones),
        first={
            name: next((each[name][1] for _, each in everyones if each[name][1]), None)
            for name in own
        },
    )
