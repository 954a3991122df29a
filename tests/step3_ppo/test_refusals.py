"""Contradictory settings of step 3."""

import pytest

from pipeline.system.errors import ConfigError
from step3_ppo.config import PPOConfig


@pytest.mark.parametrize(
    ("message", "settings"),
    [
        ("ppo.loss none is", {"loss": "none", "ppo_epochs": 2}),
        ("ppo.loss none is", {"loss": "none", "ppo_epochs": 1, "batch_size": 2}),
        ("ppo.dual_clip bounds", {"loss": "cispo", "dual_clip": 3.0}),
        ("ppo.correction_cap must", {"correction_cap": 0.5}),
        ("ppo.kl_estimator k1 in the", {"kl_in": "loss", "kl_estimator": "k1"}),
        ("ppo.kl_estimator k3 is", {"kl_in": "reward", "kl_estimator": "k3"}),
        ("ppo.group_size 3 doesn't", {"group_size": 3, "rollout_size": 64}),
        ("ppo.advantage rloo compares", {"advantage": "rloo"}),
        ("ppo.dynamic_sampling replaces", {"dynamic_sampling": 2}),
        ("ppo.drop_solved 0.9 must", {"drop_solved": 0.9}),
        ("ppo.gamma 0.9 discounts", {"advantage": "rloo", "group_size": 2, "gamma": 0.9}),
        ("ppo.overlong mask excludes", {"overlong": "mask", "overlong_buffer": 0.5}),
    ],
)
def test_contradictory_settings_are_rejected(message: str, settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        PPOConfig(**settings)
