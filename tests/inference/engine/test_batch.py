"""Requests that come and go while others run have the responses that they have alone."""

import random
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from inference.engine.batch import OpenBatch
from inference.engine.cache import page_bytes
from inference.engine.requests import Ended, Event, Reason, Request, Response, Ticket, Token
from inference.engine.sampling import Sampler
from inference.generation import pages_within
from pipeline.config import FrozenModelConfig
from pipeline.models.hf.load import load_causal_lm
from pipeline.system.errors import ConfigError, DataError
from tests.families import random_rows, saved, tiny_causal_lm

PROMPTS = [tuple(row.input_ids) for row in random_rows((7, 3, 12, 5, 1, 6, 9, 4))]
WARM = Sampler(temperature=1.0, seed=3, stop_ids=(2, 3, 4, 5))


def loaded(family: str, directory: Path, **changes: object) -> PreTrainedModel:
    path = saved(tiny_causal_lm(family, **changes), directory)
    return load_causal_lm(FrozenModelConfig(path=path), device=torch.device("cpu"))


@pytest.fixture
def llama(tmp_path: Path) -> PreTrainedModel:
    return loaded("llama", tmp_path)


def asked(number: int, sampler: Sampler = WARM, length: int = 12) -> Request:
    return Request(PROMPTS[number % len(PROMPTS)], sampler, key=40 + number, max_new_tokens=length)


def opened(model: PreTrainedModel, slots: int = 3, **settings: int) -> OpenBatch:
    return OpenBatch(model, num_slots=slots, capacity=40, **settings)


def alone(model: PreTrainedModel, request: Request) -> Response:
    batch = opened(model, slots=1)
    ticket = batch.submit(request)
    finish(batch)
    return ticket.response


def finish(batch: OpenBatch) -> list[Event]:
    events: list[Event] = []
    while batch.busy:
        events += batch.step()
    return events


def reasons(events: Sequence[Event]) -> dict[Ticket, list[Reason]]:
    found: dict[Ticket, list[Reason]] = defaultdict(list)
    for event in events:
        if isinstance(event, Ended):
            found[event.ticket].append(event.reason)
    return found


def come_one_by_one(batch: OpenBatch, requests: Sequence[Request], seed: int) -> list[Ticket]:
    """The tickets of requests that are submitted in any order, some steps apart."""
    chance = random.Random(seed)
    tickets: dict[int, Ticket] = {}
    events: list[Event] = []
    for place in chance.sample(range(len(requests)), len(requests)):
        tickets[place] = batch.submit(requests[place])
        for _ in range(chance.choice((0, 1, 2, 5))):
            events += batch.step()
    events += finish(batch)

    told: dict[Ticket, list[int]] = defaultdict(list)
    for event in events:
        if isinstance(event, Token):
            told[event.ticket].append(event.id)
    assert told == {ticket: ticket.response.ids for ticket in tickets.values()}
    assert {len(each) for each in reasons(events).values()} == {1}
    return [tickets[place] for place in range(len(requests))]


@pytest.mark.parametrize(
    "family",
    [
        "mistral",
        "bloom",
        *(pytest.param(n, marks=pytest.mark.grid) for n in ("llama", "gpt2", "falcon")),
    ],
)
def test_requests_of_every_kind_of_model_may_come_while_others_run(
    family: str, tmp_path: Path
) -> None:
    model = loaded(family, tmp_path)
    requests = [asked(number) for number in range(14)]

    tickets = come_one_by_one(opened(model), requests, seed=0)

    ids = [each.response.ids for each in tickets]
    assert ids == [alone(model, each).ids for each in requests]


def test_what_is_cancelled_ends_once_whenever_it_is(llama: PreTrainedModel) -> None:
    greedy = Sampler(temperature=0.0, seed=0)
    batch = opened(llama, slots=2)
    first, second, third, fourth, fifth = (
        batch.submit(asked(number, greedy)) for number in range(5)
    )
    batch.cancel(fifth)  # before anything has seen it
    events = [event for _ in range(4) for event in batch.step()]
    assert reasons(events) == {fifth: ["cancelled"]}
    assert len(second.response.ids) == 4

    batch.cancel(second)  # runs
    batch.cancel(third)  # waits for a slot
    batch.cancel(third)
    events += batch.step()
    assert reasons(events) == {each: ["cancelled"] for each in (fifth, second, third)}
    assert len(fourth.response.ids) == 1  # its slot was refilled in the same step
    events += finish(batch)
    batch.cancel(first)  # has ended
    batch.cancel(second)
    events += batch.step()

    assert not batch.busy
    assert reasons(events) == {
        first: ["length"],
        second: ["cancelled"],
        third: ["cancelled"],
        fourth: ["length"],
        fifth: ["cancelled"],
    }
    assert [len(each.response.ids) for each in (second, third, fifth)] == [4, 0, 0]
    for ticket in (first, fourth):
        assert ticket.response.ids == alone(llama, ticket.request).ids


@pytest.mark.jobs
def test_requests_come_from_other_threads(llama: PreTrainedModel) -> None:
    requests = [asked(number) for number in range(12)]
    expected = [alone(llama, request).ids for request in requests]
    batch = opened(llama)
    tickets: dict[int, Ticket] = {}

    def submit(numbers: Sequence[int]) -> None:
        for number in numbers:
            tickets[number] = batch.submit(requests[number])
            batch.cancel(batch.submit(requests[number]))

    threads = [threading.Thread(target=submit, args=(range(of, 12, 3),)) for of in range(3)]
    for thread in threads:
        thread.start()
    events: list[Event] = []
    while batch.busy or any(thread.is_alive() for thread in threads):
        events += batch.step()

    assert [tickets[number].response.ids for number in range(12)] == expected
    assert len(reasons(events)) == 24
    assert {len(each) for each in reasons(events).values()} == {1}


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (Request((5,) * 30, WARM, 0, 11), "a prompt of 30 tokens and a response of 11 don't fit"),
        (Request((), WARM, 0, 1), "a prompt has no tokens"),
        (Request((5,), WARM, 0, 0), "max_new_tokens must be above 0, got 0"),
        (Request((1, 99_999_999), WARM, 0, 1), "token id 99999999, but the model's are 0 to 100;"),
    ],
)
def test_a_request_that_can_not_be_answered_is_refused_in_one_sentence(
    llama: PreTrainedModel, request_: Request, sentence: str
) -> None:
    batch = opened(llama)

    with pytest.raises(DataError, match=sentence):
        batch.submit(request_)

    assert not batch.busy


def test_what_the_policy_says_is_reported_at_temperature_1_with_the_likeliest_tokens(
    llama: PreTrainedModel,
) -> None:
    """Whatever the sampler does to the logits, and next to rows that report nothing."""
    batch = opened(llama)
    biased = Sampler(temperature=0.3, seed=1, logit_bias=((7, 100.0),))
    ticket = batch.submit(Request(PROMPTS[0], biased, key=0, max_new_tokens=3, num_top=4))
    other = batch.submit(asked(1))

    events = [each for each in finish(batch) if isinstance(each, Token)]

    found = [each.reported for each in events if each.ticket is ticket]
    assert ticket.response.ids == [7, 7, 7]
    assert all(each.reported is None for each in events if each.ticket is other)
    whole = torch.tensor([[*PROMPTS[0], 7, 7, 7]])
    plain = tiny_causal_lm("llama").eval()
    with torch.no_grad():
        logprobs = plain(input_ids=whole).logits[0].log_softmax(-1)[len(PROMPTS[0]) - 1 : -1]
    for report, row in zip(found, logprobs, strict=True):
        assert report is not None
        assert report.logprob == pytest.approx(row[7].item(), abs=1e-4)
        assert [token for token, _ in report.top] == row.topk(4).indices.tolist()
        assert [value for _, value in report.top] == pytest.approx(
            row.topk(4).values.tolist(), abs=1e-4
        )


@pytest.mark.parametrize("family", ["opt", "llama", "qwen3"])
def test_the_memory_of_a_page_is_what_the_cache_takes(family: str, tmp_path: Path) -> None:
    model = loaded(family, tmp_path)
    batch = opened(model)
    batch.submit(asked(0))
    finish(batch)

    cache, one = batch._rows.cache, page_bytes(model)
    # One page for 40 tokens of each of three sequences, and one for padding.
    assert sum(each.nbytes for each in (*cache.keys, *cache.values)) == 4 * one
    assert pages_within(model, 4 * one - 1, num_tokens=65) == 3
    with pytest.raises(ConfigError, match=f"take {3 * one:,} bytes, but only {3 * one - 1:,}"):
        pages_within(model, 3 * one - 1, num_tokens=65)
