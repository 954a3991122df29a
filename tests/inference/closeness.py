"""Responses that agree up to rounding."""

from collections.abc import Iterable

import pytest

from inference.engine.requests import Response

NATS = 1e-4


def assert_close(responses: Iterable[Response], expected: Iterable[Response]) -> None:
    """Require equal tokens and endings, and log-probabilities within 1e-4 nats."""
    for one, other in zip(responses, expected, strict=True):
        assert (one.ids, one.stopped) == (other.ids, other.stopped)
        assert one.logprobs == pytest.approx(other.logprobs, abs=NATS)
