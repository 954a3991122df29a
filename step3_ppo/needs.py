"""What each advantage estimator works with, known without PyTorch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    """What an advantage estimator works with."""

    critic: bool = False
    """A value model, which is trained beside the policy."""

    group: bool = False
    """Several responses to each prompt, which are compared with each other."""

    whitening: bool = False
    """That advantages are shifted and scaled over the rollout, where `whiten_advantages` is on."""

    discount: bool = False
    """That later rewards are discounted by `gamma`."""


ESTIMATOR_NEEDS = {
    "gae": Needs(critic=True, whitening=True, discount=True),
    "grpo": Needs(group=True),
    "dr_grpo": Needs(group=True),
    "rloo": Needs(group=True),
    "reinforce_pp": Needs(whitening=True, discount=True),
    "best": Needs(group=True),
}
"""By the setting `advantage`; the functions are in `step3_ppo.advantages`."""
