"""Admission of requests, chunked prefill, and reuse of stored prefixes."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from inference.engine.batch import OpenBatch
from inference.engine.cache import PagedCache
from inference.engine.replay import PassCounts
from inference.engine.requests import Request, Response, Ticket
from inference.engine.sampling import Sampler
from inference.engine.slots import Scheduler
from inference.generation import generate_each
from pipeline.config import FrozenModelConfig
from pipeline.models.hf.load import load_causal_lm
from tests.families import random_rows, save_to, tiny_causal_lm

CAPACITY = 448
WARM = Sampler(temperature=1.0, seed=3)
TEXTS = [tuple(row.input_ids) for row in random_rows((40, 300, 25, 90, 18, 210))]


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    path = save_to(tiny_causal_lm("llama", max_position_embeddings=512), tmp_path)
    return load_causal_lm(FrozenModelConfig(path=path), device=torch.device("cpu"))


def open_batch(model: PreTrainedModel, slots: int = 3, **settings: int | None) -> OpenBatch:
    return OpenBatch(
        model,
        num_slots=slots,
        capacity=CAPACITY,
        **{"chunk": 32, "reuse_prefixes": True, **settings},
    )


def make_request(
    prompt: Sequence[int], *, key: int = 0, length: int = 12, scope: str = ""
) -> Request:
    return Request(tuple(prompt), WARM, key, length, scope=scope)


def run_request(batch: OpenBatch, request: Request) -> Ticket:
    ticket = batch.submit(request)
    finish(batch)
    return ticket


def finish(batch: OpenBatch) -> None:
    while batch.busy:
        batch.step()


def assert_close(actual: Response, expected: Response, *, count: int | None = None) -> None:
    """Assert equal tokens, and log-probabilities up to rounding."""
    assert actual.ids == expected.ids[:count]
    assert actual.logprobs == pytest.approx(expected.logprobs[:count], abs=1e-4)


def run_fresh(model: PreTrainedModel, request: Request) -> Response:
    """Return the response of a new batch, which reads the prompt in one pass."""
    return run_request(OpenBatch(model, num_slots=1, capacity=CAPACITY), request).response


def test_prefill_of_512_prompts_over_64_slots_takes_at_most_80_passes(
    model: PreTrainedModel,
) -> None:
    prompts = [(5 + row // 90, 5 + row % 90, 7, 8) for row in range(512)]
    passes = PassCounts()
    completions = generate_each(
        model,
        prompts,
        Sampler(temperature=0.0, seed=0),
        max_new_tokens=16,
        batch_size=64,
        stop_when=lambda index, ids: len(ids) == 4 + index * 7 % 13,
        passes=passes,
    )

    assert len(list(completions)) == 512
    assert passes.prefill <= 80


def test_pass_reads_only_complete_prompts_without_splitting() -> None:
    scheduler = Scheduler(PagedCache(9), num_slots=4, capacity=64, reuse=False)
    tickets = [Ticket(make_request(range(5, 5 + length))) for length in (6, 5, 4, 31)]
    scheduler.admit(dict.fromkeys(tickets))

    def lengths(*, allow_split: bool) -> list[int]:
        return [count for _, count in scheduler.next_chunks(10, allow_split=allow_split)]

    # The prefill reads all but the last token of a prompt.
    assert lengths(allow_split=True) == [5, 4, 1]
    assert lengths(allow_split=False) == [5, 4]
    scheduler.free(tickets[:3])
    assert lengths(allow_split=False) == [10]


def test_samples_of_a_prompt_share_its_full_pages() -> None:
    cache = PagedCache(num_pages=40)
    cache.keys, cache.values = [torch.zeros(40, 1, 64, 1)], [torch.zeros(40, 1, 64, 1)]
    scheduler = Scheduler(cache, num_slots=8, capacity=192, reuse=False)
    first, *others = (Ticket(make_request(range(5, 145), key=key, length=20)) for key in range(8))
    waiting = dict.fromkeys([first, *others])

    scheduler.admit(waiting)
    assert [*waiting] == others  # until the first has read the prompt
    assert scheduler.slots[0].pages == [1, 2, 3]
    cache.keys[0][3, 0, :, 0] = torch.arange(64.0)
    scheduler.record_prefilled([(scheduler.slots[0], 139)])
    scheduler.admit(waiting)

    assert not scheduler.is_prefilling
    assert [slot.pages[:2] for slot in scheduler.slots] == [[1, 2]] * 8
    last_pages = [slot.pages[2:] for slot in scheduler.slots]
    assert last_pages == [[page] for page in range(3, 11)]
    assert all(torch.equal(cache.keys[0][page], cache.keys[0][3]) for (page,) in last_pages)
    scheduler.free([first, *others])
    assert sorted(scheduler._allocate(39)) == [*range(1, 40)]  # no page is lost or has two owners


def test_request_waits_only_while_others_may_need_its_pages() -> None:
    scheduler = Scheduler(PagedCache(1 + 6), num_slots=4, capacity=128, reuse=False)
    first, second, large, third, last = (
        Ticket(make_request(range(key, key + length), length=60))
        for key, length in enumerate((50, 51, 65, 52, 53))
    )

    def admit(*tickets: Ticket) -> list[Ticket]:
        scheduler.admit(waiting := dict.fromkeys(tickets))
        scheduler.record_prefilled([(slot, slot.num_unread) for slot in scheduler.slots])
        return [*waiting]

    assert admit(first, second, large, third) == [third]
    second.response.ids += [7] * 20
    scheduler.grow({})
    scheduler.free([first])
    assert admit(third) == []  # no other sequence needs the last two pages
    assert admit(last) == [last]
    assert not scheduler.should_prefill({last: None}, is_closed=False)
    assert scheduler.should_prefill({first: None}, is_closed=False)


@pytest.mark.parametrize("reuse", [pytest.param(False, marks=pytest.mark.grid), True])
def test_newest_sequences_are_preempted_when_pages_run_out(
    model: PreTrainedModel, reuse: bool
) -> None:
    requests = [
        make_request(TEXTS[number % 4][: 20 + 3 * number], key=number, length=140 + 7 * number)
        for number in range(6)
    ]
    batch = open_batch(model, 4, num_pages=1 + 7, reuse_prefixes=reuse)  # a sequence may need 7

    tickets = [batch.submit(request) for request in requests]
    finish(batch)

    assert any(len(ticket.prompt) > len(ticket.request.prompt) for ticket in tickets)
    for ticket in tickets:
        assert_close(ticket.response, run_fresh(model, ticket.request))


def test_next_turn_reads_only_its_new_messages(model: PreTrainedModel) -> None:
    batch = open_batch(model)
    context: tuple[int, ...] = TEXTS[0]
    reused: list[int] = []
    stored: list[int] = [0]
    for turn, text in enumerate(TEXTS[1:5]):
        request = make_request(context, key=turn, length=9)

        ticket = run_request(batch, request)

        assert_close(ticket.response, run_fresh(model, request))
        reused.append(ticket.num_reused)
        stored.append(len(context) + 8)  # the last token is read with the next turn
        context = (*context, *ticket.response.ids, *text[:150])

    assert reused == stored[:-1]


@pytest.mark.jobs
@pytest.mark.parametrize("num_pages", [pytest.param(None, marks=pytest.mark.grid), 1 + 8])
def test_interleaved_dialogues_match_separate_ones(
    model: PreTrainedModel, num_pages: int | None
) -> None:
    """Turns, branches, repetitions and system prompts of two clients, in three slots."""
    rng = random.Random(0)
    prefixes = [TEXTS[0], TEXTS[3], TEXTS[0] + TEXTS[2], TEXTS[5]]
    batch = open_batch(model, num_pages=num_pages)
    tickets: list[Ticket] = []
    for number in range(24):
        prefix = rng.choice(prefixes)
        prompt = (*prefix[: rng.choice((len(prefix), 30))], *TEXTS[1][number : number + 5])
        ticket = batch.submit(make_request(prompt, key=number, length=6, scope=rng.choice("ab")))
        tickets.append(ticket)
        for _ in range(rng.choice((0, 3, 15))):
            batch.step()
        if number % 6 == 5:
            batch.cancel(rng.choice(tickets[-3:]))
        if ticket.ended and len(prompt) < 300:
            prefixes.append((*prompt, *ticket.response.ids))
    finish(batch)

    assert sum(ticket.num_reused for ticket in tickets) > 200
    for ticket in tickets:
        expected = run_fresh(model, ticket.request)
        assert_close(ticket.response, expected, count=len(ticket.response.ids))
    assert sum(len(ticket.response.ids) == 6 for ticket in tickets) >= 20


@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_stored_prefix_works_with_windows_and_learned_positions(
    family: str, tmp_path: Path
) -> None:
    path = save_to(tiny_causal_lm(family), tmp_path)
    model = load_causal_lm(FrozenModelConfig(path=path), device=torch.device("cpu"))
    greedy = Sampler(temperature=0.0, seed=0)
    prompt = TEXTS[0][:30]
    batch = OpenBatch(model, num_slots=2, capacity=60, chunk=8, reuse_prefixes=True)
    first = run_request(batch, Request(prompt, greedy, 0, 8))

    request = Request((*prompt, *first.response.ids, 5, 6), greedy, 0, 8)
    second = run_request(batch, request)

    assert second.num_reused == 37
    plain = OpenBatch(model, num_slots=1, capacity=60)
    assert second.response.ids == run_request(plain, request).response.ids
