"""The KL controller, by hand."""

import pytest

from step3_ppo.losses import KLController


def test_the_coefficient_follows_the_proportional_error_clipped_to_a_fifth() -> None:
    controller = KLController(0.1, target=6.0, horizon=1000)
    trajectory = []

    for kl in (6.0, 12.0, 6.6, 3.0, 0.0):
        controller.update(kl, responses=500)
        trajectory.append(controller.coef)

    factors = (1.0, 1.1, 1.05, 0.9, 0.9)  # 1 + error / 2 of errors 0, 0.2, 0.1, -0.2, -0.2
    expected, coef = [], 0.1
    for factor in factors:
        coef *= factor
        expected.append(coef)
    assert trajectory == pytest.approx(expected)
