"""Intervals of the report, against figures from the literature and against simulation."""

import numpy as np
import pytest

from pipeline.report.figures import change_interval, share_interval


def test_shares_have_wilsons_interval() -> None:
    # Newcombe 1998, table I, method 3: 81 of 263 is 0.2553 to 0.3662, 15 of 148 0.0624 to 0.1605,
    # 0 of 20 is 0 to 0.1611, 1 of 29 is 0.0061 to 0.1718.
    table = {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605)}
    table |= {(0, 20): (0.0, 0.1611), (1, 29): (0.0061, 0.1718)}

    for (successes, count), expected in table.items():
        assert share_interval(successes, count) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(("gain", "loss", "count"), [(0.3, 0.05, 40), (0.1, 0.1, 234), (0, 0, 20)])
def test_nineteen_of_twenty_intervals_of_a_change_hold_the_true_one(
    gain: float, loss: float, count: int
) -> None:
    random = np.random.default_rng(0)
    drawn = random.multinomial(count, [gain, loss, 1 - gain - loss], size=2000)

    held = [
        low <= gain - loss <= high
        for gained, lost, _ in drawn
        for low, high in [change_interval(int(gained), int(lost), count)]
    ]

    assert np.mean(held) > 0.935
