"""The KL controller, against hand-computed values."""

import pytest

from step3_ppo.losses import KLController


def test_kl_coefficient_follows_the_clipped_error() -> None:
    controller = KLController(0.1, target=6.0, horizon=1000)

    for kl, factor in ((6.0, 1.0), (12.0, 1.1), (6.6, 1.05), (3.0, 0.9), (0.0, 0.9)):
        expected = controller.coef * factor  # 1 + error / 2 of errors 0, 0.2, 0.1, -0.2, -0.2
        controller.update(kl, responses=500)
        assert controller.coef == pytest.approx(expected)
