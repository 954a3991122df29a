"""A failed pass ends its requests once and frees all memory."""

import traceback
import weakref
from pathlib import Path

import pytest
from torch import nn

from inference.engine.requests import EndEvent, TokenEvent
from pipeline.models.forward.forward import cache_name
from tests.inference.engine.test_batch import (
    end_reasons,
    finish,
    load,
    make_request,
    open_batch,
    run_alone,
)

FAMILIES = ("llama", "bloom")
"""One family with slots and one with padded batches."""


class FailsOnce:
    """Makes the first forward pass of a model after `armed` is set fail."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.armed = False
        self.caches: list[weakref.ref] = []
        model.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, _: nn.Module, __: tuple, kwargs: dict) -> None:
        cache = kwargs[cache_name(self.model)]
        if not self.armed:
            return
        self.armed = False
        self.caches.append(weakref.ref(cache))
        try:
            self._raise_error(cache)
        except ValueError as error:
            raise ConnectionError("no room") from error

    def _raise_error(self, cache: object) -> None:
        raise ValueError(str(type(cache)))


@pytest.mark.parametrize("family", FAMILIES)
def test_failed_pass_ends_its_requests_once_and_others_continue(
    family: str, tmp_path: Path
) -> None:
    model = load(family, tmp_path)
    batch = open_batch(model, slots=2)
    failing = FailsOnce(model)
    failing.armed = True
    tickets = [batch.submit(make_request(number)) for number in range(3)]

    events = batch.step()

    assert [type(event) for event in events] == [EndEvent, EndEvent]
    assert [*end_reasons(events).values()] == [["error"], ["error"]]
    assert set(end_reasons(events + finish(batch))) == set(tickets)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_error_ends_only_its_request(family: str, tmp_path: Path) -> None:
    model = load(family, tmp_path)
    batch = open_batch(model)
    bad, good = (batch.submit(make_request(number)) for number in (-41, 1))  # a negative key fails

    ended = end_reasons(finish(batch))

    assert (ended[bad], len(ended[good])) == (["error"], 1)
    assert good.response.ids == run_alone(model, make_request(1)).ids


@pytest.mark.parametrize("family", FAMILIES)
def test_responses_continue_in_half_the_slots_when_memory_runs_out(
    family: str, tmp_path: Path
) -> None:
    model = load(family, tmp_path)
    uninterrupted = open_batch(model, slots=8)
    expected = [uninterrupted.submit(make_request(number)) for number in range(8)]
    finish(uninterrupted)
    counts: list[int] = []

    def fail_late(_: nn.Module, __: tuple, kwargs: dict) -> None:
        cache, rows = kwargs[cache_name(model)], len(kwargs["input_ids"])
        counts.append(getattr(cache, "num_pages", rows + 1) - 1)  # the first page is for padding
        if len(counts) > 5 and counts[-1] > 3:
            raise MemoryError("no room")

    model.register_forward_pre_hook(fail_late, with_kwargs=True)
    batch = open_batch(model, slots=8)
    resumed = [batch.submit(make_request(number)) for number in range(8)]

    events = finish(batch)

    assert [*dict.fromkeys(counts)][:3] == [8, 4, 2]
    assert [t.response.ids for t in resumed] == [t.response.ids for t in expected]
    for ticket in resumed:
        streamed = [e.id for e in events if isinstance(e, TokenEvent) and e.ticket is ticket]
        assert streamed == ticket.response.ids


@pytest.mark.usefixtures("gc_disabled")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", [0, 3])
def test_kept_error_keeps_no_cache_and_no_batch(family: str, steps: int, tmp_path: Path) -> None:
    model = load(family, tmp_path)
    failing = FailsOnce(model)  # before the batch, so that its passes run the modules
    batch = open_batch(model)
    batch.submit(make_request(0))
    for _ in range(steps):
        batch.step()
    failing.armed = True

    (ended,) = batch.step()

    assert isinstance(ended, EndEvent)
    assert isinstance(ended.error, ConnectionError)
    text = "".join(traceback.format_exception(ended.error))
    assert all(part in text for part in ("no room", "in _raise_error", "in _before", "in _forward"))
    assert [cache() for cache in failing.caches] == [None]
    batch_ref = weakref.ref(batch)
    del batch
    assert batch_ref() is None
