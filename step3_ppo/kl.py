"""The KL penalty: its weight over a run, and what one token adds to the loss, by estimator.

The estimators are pure functions of tensors. Dimension name: K response tokens without padding. In
expectation over tokens drawn from the policy pi, each given its prefix,

    k2      has the gradient of KL(pi || pi_ref), the KL that RL penalizes;
    k3      has that of KL(pi_ref || pi), although its value estimates the former;
    k3_is   has that of KL(pi || pi_ref), even if an older policy drew the tokens.

k1, log pi - log pi_ref, belongs in the reward: as a loss its expected gradient is 0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from step3_ppo.losses import k2, k3

MAX_ERROR = 0.2
"""The proportional error is clipped to ± this (Ziegler et al. 2019, section 2.2)."""


@dataclass
class KLController:
    """kl_coef, fixed or steered to a target KL in nats per response (Ziegler et al. 2019, 2.2).

    e       = clip(KL / target - 1, -0.2, 0.2)
    kl_coef = kl_coef * (1 + e * responses / horizon)
    """

    base: float
    """The coefficient before `factor`."""

    target: float | None
    horizon: int

    factor: float = 1.0
    """Raised by rollbacks of guards, on top of the adaptive coefficient."""

    @property
    def coef(self) -> float:
        """The current weight of the penalty."""
        return self.base * self.factor

    def state_dict(self) -> dict[str, float]:
        """The current coefficient, before `factor`."""
        return {"coef": self.base}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the coefficient."""
        self.base = state["coef"]

    def update(self, kl: float, *, responses: int) -> None:
        """Adapt to the mean KL of a rollout of this many responses."""
        if self.target is None:
            return
        error = min(MAX_ERROR, max(-MAX_ERROR, kl / self.target - 1))
        self.base *= 1 + error * responses / self.horizon


def squared(log_ratio: Float[Tensor, " K"], ratio: Float[Tensor, " K"]) -> Float[Tensor, " K"]:
    """k2: half the square of `log_ratio`, log pi - log pi_ref."""
    del ratio
    return k2(log_ratio)


def unbiased_value(
    log_ratio: Float[Tensor, " K"], ratio: Float[Tensor, " K"]
) -> Float[Tensor, " K"]:
    """k3 (Shao et al. 2024, eq. 4): never negative, and 0 where the policies agree."""
    del ratio
    return k3(log_ratio)


def importance_weighted(
    log_ratio: Float[Tensor, " K"], ratio: Float[Tensor, " K"]
) -> Float[Tensor, " K"]:
    """k3 times pi / pi_old, both with their gradients (DeepSeek-AI 2025, V3.2, section 3.1)."""
    return ratio * k3(log_ratio)


KL_LOSSES: Mapping[str, Callable[..., Float[Tensor, " K"]]] = {
    "k2": squared,
    "k3": unbiased_value,
    "k3_is": importance_weighted,
}
"""By the setting `kl_estimator`; of (log pi - log pi_ref, pi / pi_old)."""
