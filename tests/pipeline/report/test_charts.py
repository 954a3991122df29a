"""Curves as SVG."""

import pytest

from pipeline.report.charts import smoothed, thinned


def test_smoothing_is_the_mean_of_neighbours_and_narrows_at_the_ends() -> None:
    points = [(float(step), float(step % 2)) for step in range(60)]  # 2 neighbours on each side

    means = smoothed(points)

    assert means[0] == (0.0, 0.0)
    assert means[1] == (1.0, pytest.approx(1 / 3))
    assert means[30] == (30.0, pytest.approx(2 / 5))
    assert means[-1] == (59.0, 1.0)


def test_thinning_keeps_the_one_spike_among_many_steps() -> None:
    points = [(float(step), 1.0) for step in range(50_000)]
    points[12_345] = (12_345.0, 99.0)

    kept = thinned(points, max_bins=100)

    assert len(kept) <= 200
    assert (12_345.0, 99.0) in kept
    assert kept == sorted(kept)
