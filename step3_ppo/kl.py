"""The weight of the KL penalty over a run."""

from collections.abc import Mapping
from dataclasses import dataclass

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
