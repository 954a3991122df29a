"""A pass that fails ends what it was for, once, and leaves nothing behind."""

import traceback
import weakref
from pathlib import Path

import pytest
from torch import nn

from inference.engine.requests import Ended, Token
from pipeline.models.forward.forward import cache_name
from tests.inference.engine.test_batch import alone, asked, finish, loaded, opened, reasons

FAMILIES = ("llama", "bloom")
"""With slots, and in padded batches."""


class FailsOnce:
    """Has one forward pass of a model fail, the first one after `soon` is set."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.soon = False
        self.caches: list[weakref.ref] = []
        model.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, _: nn.Module, __: tuple, kwargs: dict) -> None:
        cache = kwargs[cache_name(self.model)]
        if not self.soon:
            return
        self.soon = False
        self.caches.append(weakref.ref(cache))
        try:
            self._look_into(cache)
        except ValueError as error:
            raise ConnectionError("no room") from error

    def _look_into(self, cache: object) -> None:
        raise ValueError(str(type(cache)))


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_whose_pass_fails_end_once_and_the_others_go_on(
    family: str, tmp_path: Path
) -> None:
    model = loaded(family, tmp_path)
    batch = opened(model, slots=2)
    failing = FailsOnce(model)
    failing.soon = True
    tickets = [batch.submit(asked(number)) for number in range(3)]

    events = batch.step()

    assert [type(event) for event in events] == [Ended, Ended]
    assert [*reasons(events).values()] == [["error"], ["error"]]
    assert set(reasons(events + finish(batch))) == set(tickets)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_response_without_a_next_token_ends_alone(family: str, tmp_path: Path) -> None:
    model = loaded(family, tmp_path)
    batch = opened(model)
    bad, good = (batch.submit(asked(number)) for number in (-41, 1))  # no key is negative

    ended = reasons(finish(batch))

    assert (ended[bad], len(ended[good])) == (["error"], 1)
    assert good.response.ids == alone(model, asked(1)).ids


@pytest.mark.parametrize("family", FAMILIES)
def test_responses_continue_in_half_the_slots_when_memory_runs_out(
    family: str, tmp_path: Path
) -> None:
    model = loaded(family, tmp_path)
    expected = opened(model, slots=8)
    tickets = [expected.submit(asked(number)) for number in range(8)]
    finish(expected)
    slots: list[int] = []

    def fail_late(_: nn.Module, __: tuple, kwargs: dict) -> None:
        cache, rows = kwargs[cache_name(model)], len(kwargs["input_ids"])
        slots.append(getattr(cache, "num_pages", rows + 1) - 1)  # the first is for padding
        if len(slots) > 5 and slots[-1] > 3:
            raise MemoryError("no room")

    model.register_forward_pre_hook(fail_late, with_kwargs=True)
    batch = opened(model, slots=8)
    ours = [batch.submit(asked(number)) for number in range(8)]

    events = finish(batch)

    assert [*dict.fromkeys(slots)][:3] == [8, 4, 2]
    assert [each.response.ids for each in ours] == [each.response.ids for each in tickets]
    for ticket in ours:
        told = [each.id for each in events if isinstance(each, Token) and each.ticket is ticket]
        assert told == ticket.response.ids


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", [0, 3])
def test_who_keeps_an_error_keeps_neither_cache_nor_batch(
    family: str, steps: int, tmp_path: Path
) -> None:
    model = loaded(family, tmp_path)
    failing = FailsOnce(model)  # before the batch, whose passes then run through the modules
    batch = opened(model)
    batch.submit(asked(0))
    for _ in range(steps):
        batch.step()
    failing.soon = True

    (ended,) = batch.step()

    assert isinstance(ended, Ended)
    assert isinstance(ended.error, ConnectionError)
    said = "".join(traceback.format_exception(ended.error))
    assert all(each in said for each in ("no room", "in _look_into", "in _before", "in _forward"))
    assert [cache() for cache in failing.caches] == [None]
    kept = weakref.ref(batch)
    del batch
    assert kept() is None
