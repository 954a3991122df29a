"""Confidence intervals of the report, compared with published values and simulations."""

import numpy as np
import pytest

from pipeline.report.figures import change_interval, share_interval


def test_share_interval_is_wilsons() -> None:
    # Newcombe 1998, table I, method 3: 81 of 263 is 0.2553 to 0.3662, 15 of 148 0.0624 to 0.1605,
    # 0 of 20 is 0 to 0.1611, 1 of 29 is 0.0061 to 0.1718.
    table = {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605)}
    table |= {(0, 20): (0.0, 0.1611), (1, 29): (0.0061, 0.1718)}

    for (successes, count), expected in table.items():
        assert share_interval(successes, count) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(("gain", "loss", "count"), [(0.3, 0.05, 40), (0.1, 0.1, 234), (0, 0, 20)])
def test_change_interval_contains_the_true_change_at_95_percent(
    gain: float, loss: float, count: int
) -> None:
    rng = np.random.default_rng(0)
    samples = rng.multinomial(count, [gain, loss, 1 - gain - loss], size=2000)

    contains = [
        low <= gain - loss <= high
        for gained, lost, _ in samples
        for low, high in [change_interval(int(gained), int(lost), count)]
    ]

    assert np.mean(contains) > 0.935
