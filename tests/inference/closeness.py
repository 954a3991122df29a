"""Responses that agree up to rounding."""

from collections.abc import Iterable

import pytest

from inference.engine.requests import Response

NATS = 1e-4


def assert_close(responses: Iterable[Response], expected: Iterable[Response]) -> None:
    """Require equal tokens and endings, and log-probabilities within 1e-4 nats."""
    for actual, target in zip(responses, expected, strict=True):
        assert (actual.ids, actual.stopped) == (target.ids, target.stopped)
        assert actual.logprobs == pytest.approx(target.logprobs, abs=NATS)
