"""Figures of the report as they are read."""

from pipeline.report.words import nats, plain, points, score


def test_what_rounds_to_zero_has_no_sign_of_a_loss() -> None:
    assert nats(-0.0001218) == "0.00 nats"
    assert score(-0.001) == "+0.00"
    assert plain(-0.004) == "0.00"
    assert points(-0.0004) == "+0.0"
    assert nats(-0.0061) == "-0.01 nats"
    assert score(-0.25) == "\N{MINUS SIGN}0.25"
