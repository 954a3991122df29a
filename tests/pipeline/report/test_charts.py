"""Curves as SVG."""

import xml.etree.ElementTree as ET

import pytest

from pipeline.report.charts import Curve, line_chart, smoothed, thinned, ticks


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


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-0.3, 0.3, [-0.2, 0.0, 0.2]),
        (1.0, 400.0, [100.0, 200.0, 300.0, 400.0]),
    ],
)
def test_ticks_are_round_numbers_within_the_range(
    low: float, high: float, expected: list[float]
) -> None:
    assert ticks(low, high) == expected


def test_a_chart_is_well_formed_and_inside_its_box() -> None:
    curves = [
        Curve("training", [(float(step), 3.0 / step) for step in range(1, 100)]),
        Curve("<held out>", [(0.0, 4.0), (99.0, 0.1)], measured=True),
    ]

    svg = ET.fromstring(line_chart(curves, label='loss "<&>"'))

    assert svg.attrib["aria-label"] == 'loss "<&>"'
    dots = svg.findall("circle")
    assert [dot[0].text for dot in dots] == ["step 0: 4", "step 99: 0.1"]
    assert all(0 <= float(dot.attrib["cy"]) <= 180 for dot in dots)
    assert len(svg.findall("path[@class='raw c0']")) == 1


@pytest.mark.parametrize("value", [0.0, 7.0, -1e-9])
def test_a_constant_curve_can_be_drawn(value: float) -> None:
    svg = line_chart([Curve("gap", [(1.0, value), (2.0, value)])], label="gap")

    assert "nan" not in svg


def test_a_logarithmic_chart_has_powers_of_ten() -> None:
    curve = Curve("perplexity", [(0.0, 1100.0), (10.0, 3.0)], measured=True)

    svg = ET.fromstring(line_chart([curve], label="perplexity", logarithmic=True))

    labels = [text.text for text in svg.findall("text[@text-anchor='end']")]
    assert labels == ["10", "100", "1000"]
