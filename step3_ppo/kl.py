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

    coef: float
    target: float | None
    horizon: int

    def state_dict(self) -> dict[str, float]:
        """The coefficient that has been reached."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from another's coefficient."""
        self.coef = state["coef"]

    def update(self, kl: float, *, responses: int) -> None:
        """Record the mean KL of a rollout of so many responses."""
        if self.target is None:
            return
        error = min(MAX_ERROR, max(-MAX_ERROR, kl / self.target - 1))
        self.coef *= 1 + error * responses / self.horizon
