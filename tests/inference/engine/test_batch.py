"""Responses don't depend on requests that start and end in the same batch."""

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
from inference.engine.requests import EndEvent, Event, Reason, Request, Response, Ticket, TokenEvent
from inference.engine.sampling import Sampler
from inference.generation import fitting_pages
from pipeline.config import FrozenModelConfig
from pipeline.models.hf.load import load_causal_lm
from pipeline.system.errors import ConfigError, DataError
from tests.families import random_rows, save_to, tiny_causal_lm

PROMPTS = [tuple(row.input_ids) for row in random_rows((7, 3, 12, 5, 1, 6, 9, 4))]
WARM = Sampler(temperature=1.0, seed=3, stop_ids=(2, 3, 4, 5))


def load(family: str, directory: Path, **changes: object) -> PreTrainedModel:
    path = save_to(tiny_causal_lm(family, **changes), directory)
    return load_causal_lm(FrozenModelConfig(path=path), device=torch.device("cpu"))


@pytest.fixture
def llama(tmp_path: Path) -> PreTrainedModel:
    return load("llama", tmp_path)


def make_request(number: int, sampler: Sampler = WARM, length: int = 12) -> Request:
    return Request(PROMPTS[number % len(PROMPTS)], sampler, key=40 + number, max_new_tokens=length)


def open_batch(model: PreTrainedModel, slots: int = 3, **settings: int) -> OpenBatch:
    return OpenBatch(model, num_slots=slots, capacity=40, **settings)


def run_alone(model: PreTrainedModel, request: Request) -> Response:
    batch = open_batch(model, slots=1)
    ticket = batch.submit(request)
    finish(batch)
    return ticket.response


def finish(batch: OpenBatch) -> list[Event]:
    events: list[Event] = []
    while batch.busy:
        events += batch.step()
    return events


def end_reasons(events: Sequence[Event]) -> dict[Ticket, list[Reason]]:
    reasons: dict[Ticket, list[Reason]] = defaultdict(list)
    for event in events:
        if isinstance(event, EndEvent):
            reasons[event.ticket].append(event.reason)
    return reasons


def submit_at_random(batch: OpenBatch, requests: Sequence[Request], seed: int) -> list[Ticket]:
    """Submit requests in random order, some steps apart; return their tickets."""
    rng = random.Random(seed)
    tickets: dict[int, Ticket] = {}
    events: list[Event] = []
    for index in rng.sample(range(len(requests)), len(requests)):
        tickets[index] = batch.submit(requests[index])
        for _ in range(rng.choice((0, 1, 2, 5))):
            events += batch.step()
    events += finish(batch)

    streamed: dict[Ticket, list[int]] = defaultdict(list)
    for event in events:
        if isinstance(event, TokenEvent):
            streamed[event.ticket].append(event.id)
    assert streamed == {ticket: ticket.response.ids for ticket in tickets.values()}
    assert {len(values) for values in end_reasons(events).values()} == {1}
    return [tickets[index] for index in range(len(requests))]


@pytest.mark.parametrize(
    "family",
    [
        "mistral",
        "bloom",
        *(pytest.param(n, marks=pytest.mark.grid) for n in ("llama", "gpt2", "falcon")),
    ],
)
def test_responses_do_not_depend_on_other_requests(family: str, tmp_path: Path) -> None:
    model = load(family, tmp_path)
    requests = [make_request(number) for number in range(14)]

    tickets = submit_at_random(open_batch(model), requests, seed=0)

    ids = [ticket.response.ids for ticket in tickets]
    assert ids == [run_alone(model, request).ids for request in requests]


def test_cancelled_request_ends_once_at_any_time(llama: PreTrainedModel) -> None:
    greedy = Sampler(temperature=0.0, seed=0)
    batch = open_batch(llama, slots=2)
    first, second, third, fourth, fifth = (
        batch.submit(make_request(number, greedy)) for number in range(5)
    )
    batch.cancel(fifth)  # before the first step
    events = [event for _ in range(4) for event in batch.step()]
    assert end_reasons(events) == {fifth: ["cancelled"]}
    assert len(second.response.ids) == 4

    batch.cancel(second)  # is running
    batch.cancel(third)  # is waiting for a slot
    batch.cancel(third)
    events += batch.step()
    assert end_reasons(events) == {ticket: ["cancelled"] for ticket in (fifth, second, third)}
    assert len(fourth.response.ids) == 1  # its slot was refilled in the same step
    events += finish(batch)
    batch.cancel(first)  # has ended
    batch.cancel(second)
    events += batch.step()

    assert not batch.busy
    assert end_reasons(events) == {
        first: ["length"],
        second: ["cancelled"],
        third: ["cancelled"],
        fourth: ["length"],
        fifth: ["cancelled"],
    }
    assert [len(ticket.response.ids) for ticket in (second, third, fifth)] == [4, 0, 0]
    for ticket in (first, fourth):
        assert ticket.response.ids == run_alone(llama, ticket.request).ids


@pytest.mark.jobs
def test_requests_are_submitted_from_other_threads(llama: PreTrainedModel) -> None:
    requests = [make_request(number) for number in range(12)]
    expected = [run_alone(llama, request).ids for request in requests]
    batch = open_batch(llama)
    tickets: dict[int, Ticket] = {}

    def submit(numbers: Sequence[int]) -> None:
        for number in numbers:
            tickets[number] = batch.submit(requests[number])
            batch.cancel(batch.submit(requests[number]))

    threads = [threading.Thread(target=submit, args=(range(start, 12, 3),)) for start in range(3)]
    for thread in threads:
        thread.start()
    events: list[Event] = []
    while batch.busy or any(thread.is_alive() for thread in threads):
        events += batch.step()

    assert [tickets[number].response.ids for number in range(12)] == expected
    assert len(end_reasons(events)) == 24
    assert {len(values) for values in end_reasons(events).values()} == {1}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((5,) * 30, WARM, 0, 11), "a prompt of 30 tokens and a response of 11 don't fit"),
        (Request((), WARM, 0, 1), "a prompt has no tokens"),
        (Request((5,), WARM, 0, 0), "max_new_tokens must be positive, got 0"),
        (Request((1, 99_999_999), WARM, 0, 1), "id 99999999, but the model's ids are 0 to 100;"),
    ],
)
def test_invalid_request_is_rejected(
    llama: PreTrainedModel, request_: Request, message: str
) -> None:
    batch = open_batch(llama)

    with pytest.raises(DataError, match=message):
        batch.submit(request_)

    assert not batch.busy


def test_penalties_count_the_tokens_of_the_response_only(llama: PreTrainedModel) -> None:
    plain = run_alone(llama, make_request(0, Sampler(temperature=0.0, seed=0))).ids
    assert plain[-1] in plain[:-1]
    sampler = Sampler(temperature=0.0, seed=0, frequency_penalty=100.0)
    request = Request((*PROMPTS[0], *plain[:-1]), sampler, key=0, max_new_tokens=8)

    penalized = run_alone(llama, request).ids

    assert penalized[0] == plain[-1]
    assert len(set(penalized)) == 8


def test_reported_logprobs_are_at_temperature_1(llama: PreTrainedModel) -> None:
    """Neither the sampler's changes to the logits nor rows without reports affect them."""
    batch = open_batch(llama)
    biased = Sampler(temperature=0.3, seed=1, logit_bias=((7, 100.0),))
    ticket = batch.submit(Request(PROMPTS[0], biased, key=0, max_new_tokens=3, num_top=4))
    other = batch.submit(make_request(1))

    events = [event for event in finish(batch) if isinstance(event, TokenEvent)]

    reports = [event.top_logprobs for event in events if event.ticket is ticket]
    assert ticket.response.ids == [7, 7, 7]
    assert all(event.top_logprobs is None for event in events if event.ticket is other)
    ids = torch.tensor([[*PROMPTS[0], 7, 7, 7]])
    plain = tiny_causal_lm("llama").eval()
    with torch.no_grad():
        logprobs = plain(input_ids=ids).logits[0].log_softmax(-1)[len(PROMPTS[0]) - 1 : -1]
    for report, row in zip(reports, logprobs, strict=True):
        assert report is not None
        assert report.logprob == pytest.approx(row[7].item(), abs=1e-4)
        assert [token for token, _ in report.top] == row.topk(4).indices.tolist()
        assert [value for _, value in report.top] == pytest.approx(
            row.topk(4).values.tolist(), abs=1e-4
        )


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "longrope"])
def test_prompts_are_chunked_unless_positions_depend_on_the_length(
    llama: PreTrainedModel, rope_type: str
) -> None:
    rope = {"rope_type": rope_type}
    for parameters in (rope, {"full_attention": rope, "sliding_attention": {}}):
        llama.config.rope_parameters = parameters
        assert (open_batch(llama, chunk=4)._chunk == 4) == (rope_type == "linear")


@pytest.mark.parametrize("family", ["opt", "llama", "qwen3"])
def test_page_size_matches_the_allocated_cache(family: str, tmp_path: Path) -> None:
    model = load(family, tmp_path)
    batch = open_batch(model)
    batch.submit(make_request(0))
    finish(batch)

    cache, size = batch._rows.cache, page_bytes(model)
    # One page for the 40 tokens of each of three sequences, and one for padding.
    assert sum(tensor.nbytes for tensor in (*cache.keys, *cache.values)) == 4 * size
    assert fitting_pages(model, 4 * size - 1, num_tokens=65) == 3
    with pytest.raises(ConfigError, match=f"take {3 * size:,} bytes, but only {3 * size - 1:,}"):
        fitting_pages(model, 3 * size - 1, num_tokens=65)
