"""RL methods as settings of one loop, and the requirements of each advantage estimator."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from pipeline.config import OptimConfig

_GroupMethod = Literal["grpo", "grpo_2024", "dr_grpo", "dapo", "gspo", "cispo", "rloo"]
Method = Literal["ppo", _GroupMethod, "reinforce_pp", "raft", "distill", "gkd"]
"""Names of the methods; those of `_GroupMethod` compare the responses to a prompt."""


@dataclass(frozen=True)
class EstimatorNeeds:
    """Requirements of an advantage estimator."""

    critic: bool = False
    """A value model, which is trained in addition to the policy."""

    group: bool = False
    """Several responses per prompt, which are compared with each other."""

    whitening: bool = False
    """Whitening of advantages over the rollout, unless `whiten_advantages` is off."""

    discount: bool = False
    """Discounting of later rewards by `gamma`."""


ESTIMATOR_NEEDS = {
    "gae": EstimatorNeeds(critic=True, whitening=True, discount=True),
    "grpo": EstimatorNeeds(group=True),
    "dr_grpo": EstimatorNeeds(group=True),
    "rloo": EstimatorNeeds(group=True),
    "reinforce_pp": EstimatorNeeds(whitening=True, discount=True),
    "best": EstimatorNeeds(group=True),
}
"""Requirements of each `advantage`; the functions are in `step3_ppo.advantages`."""


LEARNING_RATES = {"actor": 1e-6, "critic": 9e-6}
"""Default learning rates for full fine-tuning, by role."""


def adam(lr: float) -> OptimConfig:
    """Return Adam's settings for PPO (Huang et al. 2024, details 16 and 17)."""
    return OptimConfig(lr=lr, betas=(0.9, 0.999), eps=1e-5, schedule="linear")


def _row(**settings: Any) -> Mapping[str, Any]:  # noqa: ANN401
    return MappingProxyType({"ppo_epochs": 1, **settings})


METHODS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # Ouyang et al. 2022.
        "ppo": MappingProxyType({}),
        # Group baselines as they are used today: Yu et al. 2025, without division by the standard
        # deviation (Liu et al. 2025) and without a length penalty.
        "grpo": _row(
            advantage="dr_grpo",
            clip_high=0.28,
            group_size=8,
            kl_in="loss",
            kl_coef=0.0,
            dynamic_sampling=3,
            overlong="mask",
            missing_eos_score=None,
        ),
        # Shao et al. 2024, eq. 3 and section 4.1.2, with the correct gradient of the KL.
        "grpo_2024": _row(
            advantage="grpo", aggregate="sequence", group_size=8, kl_in="loss", kl_coef=0.04
        ),
        # Liu et al. 2025.
        "dr_grpo": _row(advantage="dr_grpo", aggregate="constant", group_size=8, kl_in="none"),
        # Yu et al. 2025, eq. 8 to 13.
        "dapo": _row(
            advantage="grpo",
            clip_high=0.28,
            group_size=16,
            kl_in="none",
            dynamic_sampling=3,
            overlong_buffer=0.2,
            missing_eos_score=None,
        ),
        # Zheng et al. 2025, section 5.1: four minibatches per rollout.
        "gspo": _row(
            advantage="grpo",
            loss="gspo",
            aggregate="sequence",
            clip=3e-4,
            clip_high=4e-4,
            group_size=8,
            rollout_size=128,
            batch_size=32,
            kl_in="none",
        ),
        # MiniMax 2025, eq. 4 and 5, with the bound of Khatri et al. 2025.
        "cispo": _row(
            advantage="grpo",
            loss="cispo",
            clip_high=4.0,
            group_size=8,
            rollout_size=128,
            batch_size=32,
            kl_in="none",
        ),
        # Ahmadian et al. 2024.
        "rloo": _row(advantage="rloo", group_size=4, kl_coef=0.05),
        # Hu 2025.
        "reinforce_pp": _row(advantage="reinforce_pp", kl_coef=0.01),
        # Lu et al. 2025: each token's reward is its negative reverse KL; later rewards don't count.
        "distill": _row(advantage="reinforce_pp", kl_coef=1.0, gamma=0.0, whiten_advantages=False),
        # Agarwal et al. 2024: the loss is the divergence from the teacher.
        "gkd": _row(advantage="reinforce_pp", kl_in="none"),
        # Dong et al. 2023: one update per rollout.
        "raft": _row(
            advantage="best",
            loss="none",
            group_size=8,
            rollout_size=128,
            batch_size=128,
            kl_in="none",
        ),
    }
)
"""Settings by method that differ from the defaults; docs/methods.md describes when to use each."""
